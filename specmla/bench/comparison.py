"""Reads a grid's file: ours against the better peer at each point, and the class of each point."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specmla.bench.ceilings import Ceilings
from specmla.bench.cost import verify_cost
from specmla.bench.ledger import key_of
from specmla.bench.points import Point, is_regular
from specmla.testing import parse_batch

OURS = "hopper"
PEERS = ("flashmla", "fa3")
LATENCY_US = 20.0
TILE_ROWS = 64
RANK, ROPE, ITEMSIZE = 512, 64, 2
"""Of every grid that is compared: the peers serve nothing else."""


class PointClass(enum.Enum):
    """What bounds a point: fixed costs (floor below 20 µs), memory (rows <= 64) or arithmetic."""

    LATENCY = "latency"
    MEMORY = "memory-bound"
    COMPUTE = "compute-bound"


class Duel(NamedTuple):
    """One point: its floor, and times in microseconds of ours and of the better peer."""

    point: Point
    floor_us: float
    ours_us: float
    peer: str
    peer_us: float

    @property
    def ratio(self) -> float:
        """The better peer's time over ours: above 1, ours is faster."""
        return self.peer_us / self.ours_us

    @property
    def kind(self) -> PointClass:
        """The point's class."""
        if self.floor_us < LATENCY_US:
            return PointClass.LATENCY
        return PointClass.MEMORY if most_rows(self.point) <= TILE_ROWS else PointClass.COMPUTE


class Comparison:
    """The rows of a grid's file, by point and provider."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.env: Mapping[str, Any] = document["env"]
        self.rows = {key_of(row): row for row in document["rows"]}
        found = self.env["ceilings"]
        self.ceilings = Ceilings(found["copy_gbps"], found["gemm_tflops"])

    def value(self, point: Point, provider: str, field: str = "us") -> float | None:
        """Give a figure of a timed row, or None."""
        row = self.rows.get((point, provider), {})
        value = row.get(field) if row.get("us") is not None else None
        return None if value is None else float(value)

    def duel(self, point: Point) -> Duel | None:
        """Give ours against the better peer, or None unless both were timed."""
        ours = self.value(point, OURS)
        times = [(us, p) for p in PEERS if (us := self.value(point, p)) is not None]
        if ours is None or not times:
            return None
        us, peer = min(times)
        return Duel(point, self.floor_us(point), ours, peer, us)

    def duels(self) -> list[Duel]:
        """Give those of the regular grid; ragged, mixed, tree and small-page points are no part."""
        points = dict.fromkeys(point for point, _ in self.rows if is_regular(point))
        return [duel for point in points if (duel := self.duel(point)) is not None]

    def floor_us(self, point: Point) -> float:
        """Give the larger of bytes over the copy's rate and operations over the product's."""
        lens = parse_batch(point.batch)
        cost = verify_cost(
            [each.query_len for each in lens],
            [each.seq_len for each in lens],
            num_heads=point.heads,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            itemsize=ITEMSIZE,
        )
        return self.ceilings.floor_us(*cost)


def most_rows(point: Point) -> int:
    """Give Q x H of the request that brings most rows."""
    return max(lens.query_len for lens in parse_batch(point.batch)) * point.heads


def geometric_mean(values: Sequence[float]) -> float:
    """Give exp(mean(log))."""
    return math.exp(sum(map(math.log, values)) / len(values))
