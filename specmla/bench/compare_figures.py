"""The README's part about drafters and rules, from `results/compare_cpu.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmla.bench.compare_aims import compare_aims
from specmla.bench.markdown import table

PLOT = "docs/compare.png"


def compare_figures(found: Mapping[str, Any]) -> list[str]:
    """Give the paragraphs: what was run, the table, the gains, plot and command."""
    env, run = found["env"], found["options"]
    rows, prompts = found["rows"], run["prompts"]
    looping = ", ".join(
        f"{row['looping']} of {row['continuations']} at temperature {row['temperature']:g}"
        for row in _first_of_each_temperature(rows)
    )
    intro = (
        f"**Drafters and rules**, {env['date'][:10]}, torch {env['versions']['torch']}, "
        f"{run['dtype']} on one thread of a CPU ({env['cpu']['name']}): the shipped target on "
        f"{prompts['count']} excerpts of {prompts['source']} (Python {prompts['python']}), never "
        f"trained on, {run['max_tokens']} new tokens each, {run['batch']} at once, "
        f"{_turns(run['repeats'])}. Chains of K = {run['num_drafts']}; trees of up to "
        f"{run['num_nodes']} nodes, no deeper. Expected: tokens a step with the coins of "
        "acceptance integrated out, 95 % bootstrap interval over prompts. min(p, q): its sum over "
        "the vocabulary by position, if those before stand. Looping continuations are left out of "
        f"all but the speed (of the first drafter: {looping}). For the speed all take "
        "turns; the machine had other work. At temperature 0 all rules are one; for "
        "trees token-level and block verification are multi_round."
    )
    return [
        f"{intro}\n\n{_table(rows)}",
        "What is gained, in expected tokens a step: " + "; ".join(map(_gain, found["gains"])) + ".",
        compare_aims(found),
        f"![Expected tokens a step by drafter and rule, and min(p, q) by position]({PLOT})",
        f"`specmla compare --draft {','.join(run['drafts'])} -k {run['num_drafts']} --nodes "
        f"{run['num_nodes']} --num-prompts {prompts['count']} --max-tokens {run['max_tokens']} "
        f"--repeats {run['repeats']} --json --plot FILE.png`",
    ]


def _first_of_each_temperature(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    shown: dict[float, Mapping[str, Any]] = {}
    for row in rows:
        shown.setdefault(row["temperature"], row)
    return list(shown.values())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["drafter", "rule", "T", "tokens_per_step", "expected", "mean_acceptance_length"]
    header += ["draft_acceptance_rate", "min(p, q)", "tokens/s", "plain", "gain"]
    title = f"{len(rows)} rows by drafter, rule and temperature"
    return table(header, list(map(_cells, rows)), "ll", title)


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["expected_tokens_per_step_interval"]
    least, most = row["speedup_range"]
    return [
        row["drafter"],
        row["rule"],
        f"{row['temperature']:g}",
        f"{row['tokens_per_step']:.2f}",
        f"{row['expected_tokens_per_step']:.2f} ({low:.2f} to {high:.2f})",
        f"{row['mean_acceptance_length']:.2f}",
        f"{row['draft_acceptance_rate']:.2f}",
        " ".join(f"{value:.2f}" for value in row.get("overlap_per_position", [])) or "-",
        f"{row['tokens_per_s']:.0f}",
        f"{row['plain_tokens_per_s']:.0f}",
        f"{row['speedup']:.2f}x" + (f" ({least:.2f} to {most:.2f})" if most > least else ""),
    ]


def _turns(count: int) -> str:
    return f"{count} turn" + "s" * (count > 1)


def _gain(gain: Mapping[str, Any]) -> str:
    low, high = gain["interval"]
    return (
        f"{gain['what']} ({gain['drafter']}, {gain['rule']}, T = {gain['temperature']:g}) "
        f"{gain['gain']:+.3f} ({low:+.3f} to {high:+.3f})"
    )
