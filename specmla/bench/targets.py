"""The targets that the Hopper kernel is measured by, each reached or not, from a grid's file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specmla.bench.comparison import OURS, PEERS, Comparison, PointClass, geometric_mean
from specmla.bench.markdown import table
from specmla.bench.points import Point
from specmla.mask import DraftMask

HEADER = ["target", "required", "aim", "reached", "better peer", "ratio", "verdict"]


class Goal(NamedTuple):
    """What is wanted of one figure: at most (`least` false) or at least these values.

    `is_ratio` tells that the figure is a ratio of times already.
    """

    title: str
    required: float
    aim: float
    unit: str
    least: bool = False
    is_ratio: bool = False
    digits: int = 2

    def met(self, value: float, wanted: float) -> bool:
        """Tell whether a value is as good as wanted."""
        return value >= wanted if self.least else value <= wanted

    def show(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{value:.{self.digits}f} {self.unit}".rstrip()


class Judged(NamedTuple):
    """A goal with what was measured: ours, and the better peer's figure with its name."""

    goal: Goal
    value: float | None
    peer_value: float | None = None
    peer: str | None = None

    def cells(self) -> list[str]:
        """Format a line of the table."""
        goal, sign = self.goal, "≥" if self.goal.least else "≤"
        wanted = [f"{sign} {goal.show(goal.required)}", goal.show(goal.aim)]
        if self.value is None:
            return [goal.title, *wanted, "not measured", "-", "-", "-"]
        peer = "-" if self.peer_value is None else f"{goal.show(self.peer_value)} ({self.peer})"
        verdict = "aim" if goal.met(self.value, goal.aim) else "required"
        if not goal.met(self.value, goal.required):
            verdict = "no"
        return [goal.title, *wanted, goal.show(self.value), peer, self._ratio(), verdict]

    def _ratio(self) -> str:
        if self.goal.is_ratio and self.value is not None:
            return f"{self.value:.2f}"
        if self.value is None or self.peer_value is None:
            return "-"
        faster = self.value / self.peer_value if self.goal.least else self.peer_value / self.value
        return f"{faster:.2f}"


POINTS = (
    (Point("32q4s8k", 16), "us", Goal("32 x 8k, 16 heads, q 4", 84, 80, "µs", digits=1)),
    (Point("128q4s4k", 16), "gbps", Goal("128 x 4k, 16 heads, q 4", 3.85, 4.0, "TB/s", least=True)),
    (
        Point("32q2s8k", 128),
        "tflops",
        Goal("32 x 8k, 128 heads, q 2", 630, 680, "TFLOP/s", least=True, digits=0),
    ),
    (Point("1q4s4k", 16), "us", Goal("1 x 4k, 16 heads, q 4", 12, 9, "µs", digits=1)),
    (Point("1q4s128k", 16), "us", Goal("1 x 128k, 16 heads, q 4", 50, 45, "µs", digits=1)),
    (
        Point("32q1-8s8k", 16),
        "us",
        Goal("32 x 8k, 16 heads, ragged 1..8", 112, 100, "µs", digits=1),
    ),
    (
        Point("32q1-4s8k", 128),
        "us",
        Goal("32 x 8k, 128 heads, ragged 1..4", 300, 280, "µs", digits=0),
    ),
)
CLASSES = (
    (PointClass.LATENCY, 1.35, 1.8),
    (PointClass.MEMORY, 1.08, 1.2),
    (PointClass.COMPUTE, 0.97, 1.05),
)
LOWEST = Goal("compute-bound, lowest ratio", 0.93, 1.0, "", least=True, is_ratio=True)
TREE, CHAIN = (Point("32q16s8k", 16, mask.value) for mask in (DraftMask.TREE, DraftMask.CAUSAL))
TREE_COST = Goal("tree of 16 nodes over a chain of 16 rows", 1.05, 1.0, "")
ERROR = Goal("relative error over FlashMLA's, geometric mean", 1.0, 1.0, "", digits=3)
HOST = Goal("host time of an eager call, plan excluded, median", 40, 20, "µs", digits=1)


def judge(document: Mapping[str, Any]) -> list[Judged]:
    """Judge every target."""
    found = Comparison(document)
    lines = [_class_line(found, *each) for each in CLASSES]
    compute = [d for d in found.duels() if d.kind is PointClass.COMPUTE]
    worst = min(compute, key=lambda d: d.ratio, default=None)
    title = LOWEST.title if worst is None else f"{LOWEST.title} ({worst.point.batch}, "
    title += "" if worst is None else f"{worst.point.heads} heads)"
    lines.append(Judged(LOWEST._replace(title=title), None if worst is None else worst.ratio))
    lines += [_point_line(found, *each) for each in POINTS]
    return [*lines, _tree_line(found), _error_line(found), _host_line(found)]


def target_table(document: Mapping[str, Any]) -> str:
    """Format the judgement as Markdown."""
    rows = [judged.cells() for judged in judge(document)]
    return table(HEADER, rows, "lrrrrrl")


def _class_line(found: Comparison, kind: PointClass, required: float, aim: float) -> Judged:
    ratios = [duel.ratio for duel in found.duels() if duel.kind is kind]
    title = f"{kind.value}, geometric mean of {len(ratios)} points"
    goal = Goal(title, required, aim, "", least=True, is_ratio=True)
    return Judged(goal, geometric_mean(ratios) if ratios else None)


def _point_line(found: Comparison, point: Point, field: str, goal: Goal) -> Judged:
    scale = 1e-3 if field == "gbps" else 1.0
    best: Callable[..., tuple[float, str]] = max if goal.least else min
    values = [(scale * v, p) for p in PEERS if (v := found.value(point, p, field)) is not None]
    ours = found.value(point, OURS, field)
    peer_value, peer = best(values) if values else (None, None)
    return Judged(goal, None if ours is None else scale * ours, peer_value, peer)


def _tree_line(found: Comparison) -> Judged:
    tree, chain = (found.value(point, OURS) for point in (TREE, CHAIN))
    return Judged(TREE_COST, None if tree is None or chain is None else tree / chain)


def _error_line(found: Comparison) -> Judged:
    ratios = []
    for point in dict.fromkeys(point for point, _ in found.rows):
        ours, theirs = (found.value(point, name, "rel_err") for name in (OURS, "flashmla"))
        if ours and theirs:
            ratios.append(ours / theirs)
    if not ratios:
        return Judged(ERROR, None)
    return Judged(
        ERROR._replace(title=f"{ERROR.title} of {len(ratios)} points (highest {max(ratios):.3f})"),
        geometric_mean(ratios),
    )


def _host_line(found: Comparison) -> Judged:
    """Of the last run alone: what the host does is the same at every point."""
    ours = [point for point, provider in found.rows if provider == OURS]
    last = max((found.value(point, OURS, "run") or 0 for point in ours), default=0)
    times = [
        us
        for point in ours
        if (found.value(point, OURS, "run") or 0) == last
        and (us := found.value(point, OURS, "host_us")) is not None
    ]
    return Judged(HOST, statistics.median(times) if times else None)
