"""The figures of the README, as Markdown, from the raw results beside this file.

python -m specmla.bench.figures

Every number shown is read from `results/*.json`; nothing is typed in.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from specmla.bench.compare_figures import compare_figures
from specmla.bench.decode_figures import decode_figures
from specmla.bench.drafter_figures import drafter_figures
from specmla.bench.grid_figures import grid_figures

RESULTS = Path(str(files("specmla"))) / "bench" / "results"


def figures() -> str:
    """Give the whole block of the README."""
    parts = [*_grid(), _layer(), _step(), _trees()]
    parts += [
        *decode_figures(_load("h200_decode")),
        _loop(),
        *_compare(),
        _training(),
        *drafter_figures(_load("drafter_training")),
    ]
    return "\n\n".join(parts)


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _grid() -> list[str]:
    """Nothing until the grid has been measured."""
    return grid_figures(_load("h200")) if (RESULTS / "h200.json").exists() else []


def _layer() -> str:
    found = _load("h200_layer")
    shown = ("store", "fused", "absorb", "attend", "lift", "four", "layer")
    lines: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        lines.setdefault(row["batch"], {})[row["part"]] = row
    rows = [
        [f"`{batch}` {form}", *(f"{parts[part][f'{form}_us']:.1f}" for part in shown)]
        for batch, parts in lines.items()
        for form in ("eager", "captured")
    ]
    return (
        f"**One layer** of DeepSeek-V3's size at 16 heads, one {found['env']['gpu']['name']}, "
        f"{found['env']['date'][:10]}, bf16, µs: the parts of a verify one by one, the four one "
        "after another (`store`, `absorb`, `attend`, `lift`) and the whole module with its "
        "projections; `fused` stores from the projection's output, norm and rotation included.\n\n"
        + _table(["batch, µs", *shown], rows)
        + "\n\n`python -m specmla.bench layer`"
    )


def _step() -> str:
    later, first = _load("cpu_step"), _load("h200_step")
    row = later["rows"][0]
    parts = [
        f"plan {r['plan_us']:.0f} µs, commit {r['commit_us']:.0f} µs, together "
        f"{r['plan_commit_us']:.0f} µs"
        for r in (row, *first["rows"])
    ]
    return (
        f"**Host time of a step** (plan and commit, B = {row['requests']}, K = {row['drafts']}, "
        f"{row['prompt_len']} cached tokens each; medians, aim 300 µs): {parts[0]} on one "
        "thread of the CPU below, without the backend's own plan. Beside the H200, the backend's "
        f"plan included, in two runs on different hosts: {'; '.join(parts[1:])}. "
        "`python -m specmla.bench step`"
    )


def _trees() -> str:
    """What deciding about trees takes by the rules in torch."""
    found = _load("h200_trees")
    rows = [
        [row["part"], f"{row['us']:.0f}", f"{row['times_read_once']:.1f}"] for row in found["rows"]
    ]
    return (
        "**Deciding about trees** of 16 nodes, 32 requests, 129,280 ids, bf16, by the rules in "
        f"torch, one {found['env']['gpu']['name']}, {found['env']['date'][:10]}; beside the time "
        "of reading the logits once at copy bandwidth. `move` brings accepted rows to the front in "
        "61 layers. "
        'The fused kernels (`acceptance="triton"`) have not been timed yet.\n\n'
        + _table(["part", "µs", "times reading once"], rows)
        + "\n\n`python -m specmla.bench trees`"
    )


def _loop() -> str:
    found = _load("pair_cpu")
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
    return (
        "**The shipped pair** on its eight prompts, K = 4, up to 128 new tokens, float32 on one "
        f"thread of a CPU ({env['cpu']['name']}), {env['date'][:10]}. The prompts are our own; "
        "they were chosen so that greedy decoding neither ends at once nor, but for one, loops. "
        "Looping continuations (fewer than half of their 4-grams distinct) are left out of the "
        "acceptance figures, not of the speed. Drafters take turns; speeds and gains are medians, "
        "a gain against the plain run of its turn, with the range (the machine had other work at "
        "times). Verifying five rows costs a CPU more than one, so the gain shrinks with the batch "
        "and is a loss for sampling eight at once.\n\n"
        + _table([*header], rows)
        + "\n\n`python examples/pair.py --repeats 5`"
    )


def _compare() -> list[str]:
    """Nothing until drafters and rules have been compared."""
    return compare_figures(_load("compare_cpu")) if (RESULTS / "compare_cpu.json").exists() else []


def _training() -> str:
    found = _load("pair_training")
    target, drafts, name = found["target"], found["drafts"], found["evaluation"]["shipped"]
    draft = found["evaluation"]["drafts"][name]
    greedy, sampled = draft["greedy"], draft["temperature_1"]
    return (
        f"**Training** ({found['environment']['device']}): target of size {target['size']} (layers "
        f"x width x heads x MLP), {target['tokens_seen'] / 1e6:.0f} M tokens, held-out loss "
        f"{target['held_out_loss']:.2f}, {found['seconds']:.0f} s with its first drafts; draft "
        f"{name}, trained later against the same target, {drafts['tokens_seen'] / 1e6:.0f} M "
        f"tokens, {found['draft_seconds']:.0f} s. On {greedy['prompts']} prompts of modules "
        f"never trained on, K = 4: {greedy['tokens_per_step']:.2f} tokens a step greedy "
        f"({greedy['looping_excluded']} looping continuations left out; "
        f"{greedy['with_loops']['tokens_per_step']:.2f} with them), "
        f"{sampled['tokens_per_step']:.2f} at temperature 1."
    )


if __name__ == "__main__":
    print(figures())
