"""What a person sees of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from specmla.bench.compare_run import RunSettings


def comparison_rows(
    rows: Sequence[Mapping[str, Any]], settings: RunSettings, num_prompts: int
) -> Table:
    """One line a drafter, rule and temperature."""
    table = Table(
        title=f"K = {settings.num_drafts}, trees of {settings.num_nodes} nodes as deep, "
        f"{num_prompts} prompts, {settings.batch} at once"
    )
    table.add_column("drafter", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    columns = ("T", "tokens_per_step", "expected", "accepted", "rate", "min(p, q)", "tokens/s")
    for name in (*columns, "plain", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in rows:
        if last not in (None, row["temperature"]):
            table.add_section()
        last = row["temperature"]
        table.add_row(*_cells(row))
    table.caption = (
        "expected: tokens a step with the coins of acceptance integrated out, 95 % interval over "
        "prompts; accepted: mean_acceptance_length; rate: draft_acceptance_rate; min(p, q): by "
        "position, if those before stand"
    )
    return table


def gain_lines(gains: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what block verification and trees add, in tokens a step."""
    for gain in gains:
        low, high = gain["interval"]
        yield (
            f"{gain['what']}: {gain['drafter']}, {gain['rule']}, T = {gain['temperature']:g}: "
            f"{gain['gain']:+.3f} tokens a step ({low:+.3f} to {high:+.3f})"
        )


def score_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what each drafter yields along recorded texts."""
    for row in rows:
        overlap = " ".join(f"{value:.2f}" for value in row["overlap_per_position"]) or "-"
        yield (
            f"{row['drafter']}, {row['rule']}, T = {row['temperature']:g}: "
            f"{row['tokens_per_step']:.2f} tokens a step, min(p, q) {overlap}"
        )


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["expected_tokens_per_step_interval"]
    return [
        row["drafter"],
        row["rule"],
        f"{row['temperature']:g}",
        f"{row['tokens_per_step']:.2f}",
        f"{row['expected_tokens_per_step']:.2f} ({low:.2f}, {high:.2f})",
        f"{row['mean_acceptance_length']:.2f}",
        f"{row['draft_acceptance_rate']:.2f}",
        " ".join(f"{value:.2f}" for value in row.get("overlap_per_position", [])) or "-",
        f"{row['tokens_per_s']:.0f}",
        f"{row['plain_tokens_per_s']:.0f}",
        f"{row['speedup']:.2f}x",
    ]
