"""The README's part about one layer, from `results/h200_layer*.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmla.bench.markdown import table

SHOWN = ("store", "fused", "absorb", "attend", "lift", "four", "layer")
FORMS = ("eager", "captured")
VARIANTS = {
    "h200_layer_invariant": ("batch-invariant", "--batch-invariant"),
    "h200_layer_codes": ("with `kv_b_proj` as e4m3 codes", "--codes"),
}
"""Results of the same batches with an option: its words and the option."""


def layer_figures(found: Mapping[str, Any], variants: Mapping[str, Mapping[str, Any]]) -> str:
    """Give the paragraph: the parts of a plain layer, then each variant that was measured.

    Args:
        found: results of a plain layer.
        variants: results by the names of `VARIANTS`; those that are missing are left out.
    """
    text = (
        f"**One layer** of DeepSeek-V3's size at 16 heads, one {found['env']['gpu']['name']}, "
        f"{found['env']['date'][:10]}, bf16, µs: the parts of a verify one by one, the four one "
        "after another (`store`, `absorb`, `attend`, `lift`) and the whole module with its "
        "projections; `fused` stores from the projection's output, norm and rotation included.\n\n"
        + _table(found["rows"])
        + "\n\n`python -m specmla.bench layer`"
    )
    for name, (words, option) in VARIANTS.items():
        if name in variants:
            given = variants[name]
            text += (
                f"\n\nThe same layer {words}, {given['env']['date'][:10]}:\n\n"
                f"{_table(given['rows'])}\n\n`python -m specmla.bench layer {option}`"
            )
    return text


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["batch"], {})[row["part"]] = row
    lines = [
        [f"`{batch}` {form}", *(_cell(parts.get(part), form) for part in SHOWN)]
        for batch, parts in found.items()
        for form in FORMS
    ]
    return table(["batch, µs", *SHOWN], lines)


def _cell(row: Mapping[str, Any] | None, form: str) -> str:
    value = None if row is None else row[f"{form}_us"]
    return "-" if value is None else f"{value:.1f}"
