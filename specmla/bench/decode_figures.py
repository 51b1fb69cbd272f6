"""The README's part about whole decoding loops, from `results/h200_decode.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specmla.bench.environment import command_of, place_of
from specmla.bench.markdown import table

AIM = 1.5
"""Times plain decoding."""


def decode_figures(found: Mapping[str, Any]) -> list[str]:
    """Give the paragraphs: what was run, tokens a second, where the aim holds and what loses."""
    env, rows = found["env"], found["rows"]
    drafted = [row for row in rows if row["drafts"]]
    captured = "uncaptured" not in env["mode"]
    fused = any(row.get("acceptance") == "triton" for row in rows)
    intro = (
        f"**Whole loops{', captured' * captured}{', fused acceptance' * fused}**, one "
        f"{place_of(env)}, {env['date'][:10]}, torch {env['versions']['torch']}, {env['dtype']}: "
        f"the shipped target on its first B of {env['prompts']['count']} excerpts of held-out "
        f"modules, K = {drafted[0]['drafts']} for every drafter, backend "
        f"{' and '.join(dict.fromkeys(row['backend'] for row in rows))}. Plain decoding is "
        f"{'captured' if captured else 'run'} the same way ({env['mode']}). Timed from the third "
        "step until the first request ends. In a cell: tokens/s, steps/s, times plain decoding, "
        "tokens a step and request."
    )
    said = " ".join((_aim(drafted), _losses(drafted), *_hosts(rows)))
    return [f"{intro}\n\n{_table(rows)}", said, command_of(env)]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = sorted({_column(row) for row in rows})
    cells = {(row["drafter"], _column(row)): _cell(row) for row in rows}
    header = ["drafter", *(f"T = {t:g}, B = {b}" for t, b in columns)]
    lines = []
    for name in dict.fromkeys(row["drafter"] for row in rows):
        lines.append([name, *(cells[name, column] for column in columns)])
    return table(header, lines)


def _column(row: Mapping[str, Any]) -> tuple[float, int]:
    return row["temperature"], row["requests"]


def _cell(row: Mapping[str, Any]) -> str:
    speed = f"{row['tokens_per_s']:.0f}, {row['steps_per_s']:.0f}"
    gain = f", {row['speedup']:.2f}x, {row['tokens_per_step']:.2f}"
    return speed + gain if row["drafts"] else speed


def _aim(drafted: Sequence[Mapping[str, Any]]) -> str:
    """Say where the aim holds, by temperature and batch, and with which drafters."""
    parts = []
    for column in sorted({_column(row) for row in drafted}):
        good = [r["drafter"] for r in drafted if _column(r) == column and r["speedup"] >= AIM]
        names = ", ".join(good) or "none"
        parts.append(f"T = {column[0]:g}, B = {column[1]}: {names}")
    return f"At least {AIM:g} times plain decoding (the aim): {'; '.join(parts)}."


def _losses(drafted: Sequence[Mapping[str, Any]]) -> str:
    slower = [
        f"{r['drafter']} at T = {r['temperature']:g}, B = {r['requests']} ({r['speedup']:.2f}x)"
        for r in drafted
        if round(r["speedup"], 2) < 1
    ]
    return f"Slower than plain decoding: {', '.join(slower) or 'none'}."


def _hosts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what the host takes of a step, by batch size, plain and with drafters."""
    by_batch: dict[int, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["host_us"] is not None:
            by_batch.setdefault(row["requests"], ([], []))[bool(row["drafts"])].append(
                row["host_us"]
            )
    parts = [
        f"B = {b}: {'; '.join(f'{min(us):.0f} to {max(us):.0f}' for us in found if us)}"
        for b, found in sorted(by_batch.items())
    ]
    if parts:
        yield f"Host time of a step, µs, plain and then with drafters: {', '.join(parts)}."
