"""The README's part about the shipped drafters' training, from `results/drafter_training.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmla.bench.markdown import table

PLOT = "docs/drafter_training.png"
AIMS = {"greedy": 3.2, "temperature_1": 2.3}
"""Tokens a step that DFlash or DSpark should reach."""
BLOCKS = ("dflash", "dspark")


def drafter_figures(found: Mapping[str, Any]) -> list[str]:
    """Give the paragraphs: what was trained, the table with the aims, plot and command."""
    training, options = found["training"], found["environment"]["options"]
    drafters, sizes = found["evaluation"], found["bytes"]
    some = drafters["dspark"]
    kept = {kind: some[kind]["prompts"] - some[kind]["looping_excluded"] for kind in AIMS}
    intro = (
        f"**Drafters of hidden states** for the shipped target, {found['environment']['device']}, "
        f"{found['environment']['date']}: {', '.join(sizes)} trained side by side in "
        f"{found['seconds']:.0f} s, evaluation included, on {training['tokens_seen'] / 1e6:.0f} M "
        f"tokens; DFlash and DSpark of {options['num_layers']} layers read the target's layers "
        f"{options['target_layers'].strip('()')}. Tokens a step on {some['greedy']['prompts']} "
        "prompts of modules never trained on, K drafts a step; looping continuations are left out, "
        f"so that {kept['greedy']} count when greedy and {kept['temperature_1']} at temperature 1 "
        "(of DSpark). Expected: of acceptance at teacher-forced places."
    )
    shown = _table(drafters, training["held_out"], sizes)
    return [f"{intro}\n\n{shown}", _aims(drafters), _command(options, list(sizes))]


def _table(
    drafters: Mapping[str, Any], held_out: Mapping[str, Any], sizes: Mapping[str, int]
) -> str:
    header = ["drafter", "MB", "K", "greedy", "by position", "T = 1", "by position", "expected"]
    lines = []
    for name, row in drafters.items():
        cells = [name, f"{sizes[name] / 1e6:.2f}" if name in sizes else "-"]
        cells.append(str(row["num_speculative_tokens"]))
        for kind in AIMS:
            rates = row[kind]["acceptance_rate_per_position"]
            cells += [f"{row[kind]['tokens_per_step']:.2f}", " ".join(f"{r:.2f}" for r in rates)]
        known = held_out.get(name)
        cells.append(f"{known['expected_tokens_per_step']:.2f}" if known else "-")
        lines.append(cells)
    return table(header, lines)


def _aims(drafters: Mapping[str, Any]) -> str:
    parts = []
    for kind, aim in AIMS.items():
        best = max(BLOCKS, key=lambda name: drafters[name][kind]["tokens_per_step"])
        value = drafters[best][kind]["tokens_per_step"]
        verdict = "reached" if value >= aim else "not reached"
        label = "greedy" if kind == "greedy" else "at temperature 1"
        parts.append(f"{aim:g} {label}: {verdict} ({best} {value:.2f})")
    return (
        f"Aims for DFlash or DSpark: {'; '.join(parts)}.\n\n"
        f"![Divergence, expected tokens a step and acceptance by place in training]({PLOT})"
    )


def _command(options: Mapping[str, str], methods: Sequence[str]) -> str:
    layers = options["target_layers"].strip("()").replace(",", "")
    return (
        f"`python examples/train_drafter.py --method {' '.join(methods)} --minutes "
        f"{options['minutes']} --target-layers {layers} --prompts {options['prompts']} --out DIR`"
    )
