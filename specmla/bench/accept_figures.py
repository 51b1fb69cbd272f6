"""The README's part about deciding at a real vocabulary, from `results/h200_accept.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmla.bench.environment import command_of, place_of
from specmla.bench.markdown import table
from specmla.bench.report import TIMED, WRONG

Row = Mapping[str, Any]
FORM = ("shape", "rule", "sampling", "q", "spread")


def accept_figures(found: Mapping[str, Any]) -> list[str]:
    """Give the paragraphs: what was run, a row for each form, where the aims hold, the command."""
    env, rows = found["env"], found["rows"]
    drafts = {r["shape"]: r["drafts"] for r in rows}
    sizes = [f"{'chains' if s == 'chain' else 'trees'} of {k} drafts" for s, k in drafts.items()]
    intro = (
        f"**Deciding** with the fused kernels and by the rules in torch, {rows[0]['requests']} "
        f"requests, {rows[0]['vocab']:,} ids, {' and '.join(sizes)}, {rows[0]['dtype']} logits, "
        f"float32 q, one {place_of(env)}, {env['date'][:10]}; beside a sort of all logits "
        "with its softmax, which decides nothing yet. `x` is times reading logits and q once at "
        f"the bandwidth of a copy ({found['copy_bytes_per_s'] / 1e12:.2f} TB/s)."
    )
    parts = [f"{intro}\n\n{_table(rows)}", _aims(rows)]
    if found["forms_left"]:
        parts[1] += f" {found['forms_left']} forms more were not measured: the time was used up."
    if "note" in env:
        parts[1] += f" {env['note']}"
    return [*parts, command_of(env)]


def _table(rows: Sequence[Row]) -> str:
    forms: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        forms.setdefault(tuple(row[key] for key in FORM), {})[row["provider"]] = row
    many = len({form[-1] for form in forms}) > 1
    shown = len(FORM) if many else len(FORM) - 1
    header = ["", *FORM[1:shown], "read once, µs", "fused, µs", "x", "aim", "torch, µs", "x"]
    header += ["sort, µs", "x"]
    lines = []
    for form, by in forms.items():
        one = next(iter(by.values()))
        aim = "-" if one["aim"] is None else f"{one['aim']:g}"
        cells = [f"{one['read_us']:.0f}", *_cells(by, "triton"), aim]
        cells += [*_cells(by, "torch"), *_cells(by, "sort")]
        lines.append([*map(str, form[:shown]), *cells])
    return table(header, lines, "l" * shown, f"{len(lines)} forms by shape, rule, filter and q")


def _cells(by: Mapping[str, Row], provider: str) -> list[str]:
    row = by.get(provider)
    if row is None or row["status"] != TIMED:
        return ["-" if row is None else row["status"], "-"]
    return [f"{row['us']:.0f}", f"{row['times_read']:.1f}"]


def _aims(rows: Sequence[Row]) -> str:
    """Say which forms of the kernels miss the aim, by name, and which are wrong or slower."""
    fused = [r for r in rows if r["provider"] == "triton"]
    timed = [r for r in fused if r["status"] == TIMED]
    judged = [r for r in timed if r["aim"] is not None]
    late = [f"{_name(r)} ({r['times_read']:.1f})" for r in judged if r["times_read"] > r["aim"]]
    text = f"The aim holds for {len(judged) - len(late)} of {len(judged)} forms of chains"
    text += f"; not for {', '.join(late)}." if late else "."
    wrong = [_name(r) for r in fused if r["status"] == WRONG]
    other = {tuple(r[k] for k in FORM): r for r in rows if r["provider"] == "torch"}
    slower = []
    for row in timed:
        beside = other.get(tuple(row[k] for k in FORM))
        if beside is not None and beside["status"] == TIMED and beside["us"] < row["us"]:
            slower.append(_name(row))
    text += f" Wrong: {', '.join(wrong)}." if wrong else ""
    return text + (f" Slower than torch: {', '.join(slower)}." if slower else "")


def _name(row: Row) -> str:
    return f"{row['shape']} {row['rule']} {row['sampling']} {row['q']}"
