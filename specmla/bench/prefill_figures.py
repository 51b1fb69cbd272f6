"""The README's part about prompts, from `results/h200_prefill.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmla.bench.environment import command_of, place_of
from specmla.bench.markdown import table

SLOWER_AIM = 1.05
"""Most that chunks may take, times one pass, where that fits."""
OF_BEST_AIM = 0.60
"""Least rate of our kernel, times the best provider's."""
OURS = "triton"

Row = Mapping[str, Any]


def prefill_figures(found: Mapping[str, Any]) -> list[str]:
    """Give the paragraphs: chunks beside one pass, then kernels beside each other."""
    env, rows = found["env"], found["rows"]
    chunked = [row for row in rows if "form" in row]
    kernels = [row for row in rows if "provider" in row]
    parts = []
    if chunked:
        some = chunked[0]
        parts.append(
            f"**Prompts over long context**, one {place_of(env)}, {env['date'][:10]}: "
            f"{some['rows']} new rows of one layer, {some['heads']} heads, {some['dtype']}, "
            f"backend {some['backend']}; gather, up-projection, attention and merge, in one pass "
            "over all keys and in chunks of a workspace of so many rows. Times one pass in "
            "brackets; memory beyond inputs, workspace and result.\n\n"
            f"{_contexts(chunked)}\n\n{_flatness(chunked)} {_slowest(chunked)}"
        )
    if kernels:
        some = kernels[0]
        parts.append(
            f"**Kernels for prompts**, one {place_of(env)}, {env['date'][:10]}: "
            f"{some['heads']} heads, keys {some['width']} and values {some['value_width']} wide, "
            f"{some['dtype']}, causal; last rows checked against float64. In a cell: TFLOP/s "
            f"(µs).\n\n{_providers(kernels)}\n\n{_of_best(kernels)} {env.get('note', '')}".rstrip()
        )
    return [*parts, command_of(env)]


def _form(row: Row) -> str:
    return row["form"] if row["workspace_rows"] is None else f"chunks of {row['workspace_rows']}"


def _contexts(rows: Sequence[Row]) -> str:
    forms = list(dict.fromkeys(map(_form, rows)))
    cells = {(row["context"], _form(row)): row for row in rows}
    lines = []
    for context in dict.fromkeys(row["context"] for row in rows):
        given = [cells.get((context, form)) for form in forms]
        lines.append([f"{context}", *map(_time, given), *map(_peak, given)])
    header = ["context", *(f"{form}, ms" for form in forms), *(f"{form}, MiB" for form in forms)]
    return table(header, lines)


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return "no room"
    ratio = row.get("ratio")
    return f"{row['us'] / 1e3:.2f}" + (f" ({ratio:.2f})" if ratio is not None else "")


def _peak(row: Row | None) -> str:
    return "-" if row is None or row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"


def _flatness(rows: Sequence[Row]) -> str:
    """Say how far the peak of each workspace moves over the contexts that fill it."""
    found = []
    for form in dict.fromkeys(_form(row) for row in rows if row["workspace_rows"] is not None):
        held = [r for r in rows if _form(r) == form and r["peak_bytes"] is not None]
        full = [r for r in held if r["context"] >= r["workspace_rows"]]
        if full:
            peaks, contexts = [r["peak_bytes"] for r in full], [r["context"] for r in full]
            found.append(
                f"{form}: {min(peaks) / 2**20:.0f} to {max(peaks) / 2**20:.0f} MiB from "
                f"{min(contexts)} to {max(contexts)} tokens"
            )
    return f"Peak of full chunks over the contexts: {'; '.join(found) or 'not measured'}."


def _slowest(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row.get("ratio") is not None]
    if not known:
        return "Nothing to compare: one pass fits nowhere."
    worst = max(known, key=lambda row: row["ratio"])
    verdict = "reached" if worst["ratio"] <= SLOWER_AIM else "not reached"
    return (
        f"At most {100 * (SLOWER_AIM - 1):.0f} % slower than one pass (the aim): {verdict} "
        f"(most {worst['ratio']:.2f} times, {_form(worst)}, context {worst['context']})."
    )


def _providers(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row["provider"] for row in rows))
    cells = {(row["batch"], row["provider"]): _rate(row) for row in rows}
    batches = dict.fromkeys(row["batch"] for row in rows)
    return table(
        ["batch", *names],
        [[f"`{batch}`", *(cells.get((batch, name), "-") for name in names)] for batch in batches],
    )


def _rate(row: Row) -> str:
    return row["status"] if row["us"] is None else f"{row['tflops']:.0f} ({row['us']:.0f})"


def _of_best(rows: Sequence[Row]) -> str:
    """Judge our kernel by its worst batch."""
    ours = [r for r in rows if r["provider"] == OURS and r["of_best"] is not None]
    if not ours:
        return f"{OURS} was not timed."
    worst = min(ours, key=lambda row: row["of_best"])
    verdict = "reached" if worst["of_best"] >= OF_BEST_AIM else "not reached"
    return (
        f"{OURS} at {100 * OF_BEST_AIM:.0f} % of the best one's rate or more (the aim): {verdict} "
        f"(least {100 * worst['of_best']:.0f} %, `{worst['batch']}`)."
    )
