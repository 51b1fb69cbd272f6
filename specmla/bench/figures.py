"""The figures of the README, as Markdown, from the raw results beside this file.

python -m specmla.bench.figures

Every number shown is read from `results/*.json`; nothing is typed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from specmla.bench.accept_figures import accept_figures
from specmla.bench.compare_figures import compare_figures
from specmla.bench.decode_figures import decode_figures
from specmla.bench.drafter_figures import drafter_figures
from specmla.bench.format_figures import format_figures
from specmla.bench.grid_figures import grid_figures
from specmla.bench.layer_figures import layer_figures
from specmla.bench.markdown import table
from specmla.bench.prefill_figures import prefill_figures
from specmla.bench.step_figures import step_figures
from specmla.bench.tree_figures import tree_figures

RESULTS = Path(str(files("specmla"))) / "bench" / "results"
Results = Mapping[str, dict[str, Any]]
"""What each file holds, by its name."""
Make = Callable[[dict[str, Any], Results], list[str]]
"""Gives the paragraphs about one file's results, with all others at hand."""


def figures(results: Path = RESULTS) -> str:
    """Give the whole block of the README; what has not been measured is left out.

    Args:
        results: directory of the raw results.
    """
    found = {path.stem: _read(path) for path in results.glob("*.json")}
    parts = [text for name, make in SECTIONS if name in found for text in make(found[name], found)]
    return "\n\n".join(parts)


def _read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _step(found: dict[str, Any], others: Results) -> list[str]:
    row, beside = found["rows"][0], others.get("h200_step", {"rows": []})["rows"]
    parts = [
        f"plan {r['plan_us']:.0f} µs, commit {r['commit_us']:.0f} µs, together "
        f"{r['plan_commit_us']:.0f} µs"
        for r in (row, *beside)
    ]
    gpu = (
        " Beside the H200, the backend's plan included, in two runs on different hosts: "
        f"{'; '.join(parts[1:])}."
        if beside
        else ""
    )
    return [
        f"**Host time of a step** (plan and commit, B = {row['requests']}, K = {row['drafts']}, "
        f"{row['prompt_len']} cached tokens each; medians, aim 300 µs): {parts[0]} on one "
        f"thread of the CPU below, without the backend's own plan.{gpu} "
        "`python -m specmla.bench step`"
    ]


def _loop(found: dict[str, Any], others: Results) -> list[str]:
    rows = []
    for row in found["rows"]:
        rates = " ".join(f"{rate:.2f}" for rate in row["acceptance_rate_per_position"]) or "-"
        low, high = row["speedup_range"]
        rows.append(
            [
                row["drafter"],
                f"{row['temperature']:g}",
                str(row["batch"]),
                f"{row['tokens_per_step']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
                f"{row['draft_acceptance_rate']:.2f}",
                rates,
                f"{row['distinct_4gram_ratio']:.2f}",
                f"{row['looping']} of {row['continuations']}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})",
            ]
        )
    header = ["drafter", "T", "at once", "tokens_per_step", "mean_acceptance_length"]
    header += ["draft_acceptance_rate", "by position", "distinct 4-grams", "looping", "tokens/s"]
    header += ["against plain"]
    env = found["env"]
    return [
        "**The shipped pair** on its eight prompts, K = 4, up to 128 new tokens, float32 on one "
        f"thread of a CPU ({env['cpu']['name']}), {env['date'][:10]}. The prompts are our own; "
        "they were chosen so that greedy decoding neither ends at once nor, but for one, loops. "
        "Looping continuations (fewer than half of their 4-grams distinct) are left out of the "
        "acceptance figures, not of the speed. Drafters take turns; speeds and gains are medians, "
        "a gain against the plain run of its turn, with the range (the machine had other work at "
        "times). Verifying five rows costs a CPU more than one, so the gain shrinks with the batch "
        "and is a loss for sampling eight at once.\n\n"
        + table(header, rows)
        + "\n\n`python examples/pair.py --repeats 5`"
    ]


def _training(found: dict[str, Any], others: Results) -> list[str]:
    target, drafts, name = found["target"], found["drafts"], found["evaluation"]["shipped"]
    draft = found["evaluation"]["drafts"][name]
    greedy, sampled = draft["greedy"], draft["temperature_1"]
    return [
        f"**Training** ({found['environment']['device']}): target of size {target['size']} (layers "
        f"x width x heads x MLP), {target['tokens_seen'] / 1e6:.0f} M tokens, held-out loss "
        f"{target['held_out_loss']:.2f}, {found['seconds']:.0f} s with its first drafts; draft "
        f"{name}, trained later against the same target, {drafts['tokens_seen'] / 1e6:.0f} M "
        f"tokens, {found['draft_seconds']:.0f} s. On {greedy['prompts']} prompts of modules "
        f"never trained on, K = 4: {greedy['tokens_per_step']:.2f} tokens a step greedy "
        f"({greedy['looping_excluded']} looping continuations left out; "
        f"{greedy['with_loops']['tokens_per_step']:.2f} with them), "
        f"{sampled['tokens_per_step']:.2f} at temperature 1."
    ]


SECTIONS: tuple[tuple[str, Make], ...] = (
    ("h200", lambda found, others: grid_figures(found)),
    ("h200_formats", lambda found, others: format_figures(found)),
    ("h200_layer", lambda found, others: [layer_figures(found, others)]),
    ("h200_prefill", lambda found, others: prefill_figures(found)),
    ("cpu_step", _step),
    ("h200_step_model", lambda found, others: step_figures(found)),
    ("h200_accept", lambda found, others: accept_figures(found)),
    ("h200_trees", tree_figures),
    ("h200_decode", lambda found, others: decode_figures(found)),
    ("h200_decode_fused", lambda found, others: decode_figures(found)),
    ("pair_cpu", _loop),
    ("compare_cpu", lambda found, others: compare_figures(found)),
    ("pair_training", _training),
    ("drafter_training", lambda found, others: drafter_figures(found)),
)
"""Results by the names of their files, in the order of the README, and what tells them."""


if __name__ == "__main__":
    print(figures())
