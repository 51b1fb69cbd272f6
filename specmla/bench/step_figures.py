"""The README's part about whole steps of a model, from `results/h200_step_model.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmla.bench.environment import command_of, place_of
from specmla.bench.markdown import table


def step_figures(found: Mapping[str, Any]) -> list[str]:
    """Give the paragraph: tokens a second by batch size and K, the best and the break-even K."""
    env, rows = found["env"], found["rows"]
    most = max(rows, key=lambda row: row["drafts"])
    config, graphs = env["config"], all(row["captured_us"] is not None for row in rows)
    intro = (
        f"**Whole steps{', captured' if graphs else ''}**, one {place_of(env)}, "
        f"{env['date'][:10]}, {most['dtype']}: {most['layers']} layers {config['hidden_size']} "
        f"wide with {most['heads']} heads ({env['mlp']}), random weights, "
        f"{most['context']} cached tokens a request, backend {most['backend']}. "
        "Chances that a draft stands if all before it do: "
        f"{', '.join(f'{rate:g}' for rate in most['acceptance'])}; a draft costs "
        f"{most['draft_us']:g} µs. In a cell: tokens/s (µs of a step). Break-even: the most drafts "
        "that are no slower than none."
    )
    return [f"{intro}\n\n{_table(found)}", command_of(env)]


def _table(found: Mapping[str, Any]) -> str:
    counts = sorted({row["drafts"] for row in found["rows"]})
    cells = {(row["requests"], row["drafts"]): _cell(row) for row in found["rows"]}
    header = ["batch", *(f"K = {count}" for count in counts), "best K", "break-even K"]
    lines = []
    for summary in found["summaries"]:
        requests = summary["requests"]
        ends = [str(summary[name]) for name in ("best_drafts", "break_even_drafts")]
        lines.append([str(requests), *(cells[requests, count] for count in counts), *ends])
    return table(header, lines)


def _cell(row: Mapping[str, Any]) -> str:
    taken = row["captured_us"] if row["captured_us"] is not None else row["eager_us"]
    return f"{row['tokens_per_s']:.0f} ({taken:.0f})"
