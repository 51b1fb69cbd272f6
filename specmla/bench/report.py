"""Rows of a benchmark, as a table for people and as JSON for scripts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
TIMED, REFUSED, WRONG = "timed", "refused", "wrong"
ABSENT, FAILED = "absent", "failed"


@dataclasses.dataclass(frozen=True)
class VerifyRow:
    """One provider on one batch.

    Attributes:
        batch: in the batch grammar.
        heads, mask, page_size, dtype: of the run.
        provider: name.
        status: "timed", "refused" (absent or unfit) or "wrong" (its result is, so it isn't timed).
        reason: why there is no figure, else None.
        us, us_p10, us_p90: microseconds of one layer's attention, None without a figure.
        ratio: us over that of the first provider that was timed on this batch.
        gbps, tflops: unique cache bytes and operations of all rows over `us`.
        rel_err: norm of the error against float64, over the norm of the result.
        plan_us: host time of a step's metadata and plan, shared by all layers.
        scratch_bytes: peak device memory of plan and call beyond the outputs, the step's tables
            included; None on a CPU.
        method: how `us` was measured.
        cache_format: name of a quantised cache's, None for plain rows.
    """

    batch: str
    heads: int
    mask: str
    page_size: int
    dtype: str
    provider: str
    status: str = TIMED
    reason: str | None = None
    us: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    ratio: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    rel_err: float | None = None
    plan_us: float | None = None
    scratch_bytes: int | None = None
    method: str | None = None
    cache_format: str | None = None


@dataclasses.dataclass(frozen=True)
class GridRow(VerifyRow):
    """One provider at one point of the grid, with what else is measured there.

    Attributes:
        status: also "absent" (not installed) and "failed" (it raised; the reason says what).
        plan_us: here only what the backend's plan costs, the device awaited, without the tables.
        host_us: time until an eager call returns, plan excluded; None on a CPU.
        checked_requests: of the batch, compared with float64.
        calls, rounds: timed calls in a pass, and passes.
        note: what a reader of the figure must know.
        run: index into the file's `env["runs"]`.
    """

    host_us: float | None = None
    checked_requests: int | None = None
    calls: int | None = None
    rounds: int | None = None
    note: str | None = None
    run: int | None = None


COLUMNS = (
    ("batch", "batch"),
    ("heads", "heads"),
    ("provider", "provider"),
    ("us", "µs"),
    ("gbps", "GB/s"),
    ("tflops", "TFLOP/s"),
    ("ratio", "ratio"),
    ("rel_err", "rel err"),
    ("plan_us", "plan µs"),
    ("scratch_bytes", "scratch MiB"),
)
LEFT = ("batch", "provider")


def table(rows: Sequence[VerifyRow]) -> str:
    """Format rows as an aligned plain-text table; a row without figures ends with its reason."""
    keys = [key for key, _ in COLUMNS]
    cells = [[title for _, title in COLUMNS]]
    cells += [[_cell(key, getattr(row, key)) for key in keys] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    lines = []
    for i, line in enumerate(cells):
        parts = [
            text.ljust(width) if key in LEFT else text.rjust(width)
            for key, text, width in zip(keys, line, widths, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
        reason = rows[i - 1].reason if i else None
        if reason:
            lines.append(f"    {rows[i - 1].provider}: {reason}")
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "rel_err":
        return f"{value:.2e}"
    if key == "ratio":
        return f"{value:.2f}x"
    if key == "scratch_bytes":
        return f"{value / MIB:.2f}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def document(env: Mapping[str, Any], rows: Sequence[VerifyRow]) -> dict[str, Any]:
    """Give the JSON document `{"env", "rows"}`; "reason" and "cache_format" only where given."""
    plain = [dataclasses.asdict(row) for row in rows]
    for row in plain:
        for key in ("reason", "cache_format"):
            if row[key] is None:
                del row[key]
    return {"env": dict(env), "rows": plain}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, as strict JSON."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
