"""What a plan of the Hopper kernel fits and how much it reserves; needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from specmla.buffers import Buffer

TILE_ROWS = 64
BLOCK_KEYS = 64
PROGRAM_FIELDS = 16
RECORD_FIELDS = 8
"""Ints of an entry and of a merge record."""


@dataclass(frozen=True)
class PlanShape:
    """What a plan fits; no length is part of it, so that a replay may bring others.

    Attributes:
        num_rows, num_requests, num_heads: T, B, H.
        run: blocks of a batch-invariant piece, 0 for balanced ones.
        runs: most such pieces of a tile, by the width of the block table.
    """

    num_rows: int
    num_requests: int
    num_heads: int
    run: int
    runs: int

    @property
    def num_tiles(self) -> int:
        """Most tiles of 64 packed rows, however the rows are shared out over the requests."""
        # The last tile of a request lacks at most 64 - gcd rows; rows of no request are one more.
        spare = TILE_ROWS - gcd(TILE_ROWS, self.num_heads)
        return (self.num_rows * self.num_heads + (self.num_requests + 1) * spare) // TILE_ROWS


def plan_shape(
    num_rows: int, num_requests: int, num_heads: int, run: int, table_keys: int
) -> PlanShape:
    """Describe a step of T rows of B requests; `run` and `table_keys` say how far it is cut.

    Args:
        num_rows: T. num_requests: B. num_heads: H.
        run: blocks of 64 keys of a batch-invariant piece; 0 balances the pieces.
        table_keys: keys of a request that the block table has room for.
    """
    runs = -(-table_keys // (run * BLOCK_KEYS)) if run else 0
    return PlanShape(num_rows, num_requests, num_heads, run, runs)


def plan_buffers(shape: PlanShape, num_sms: int) -> tuple[Buffer, Buffer, Buffer]:
    """Say what a plan reserves: records (`record_sizes`), partial outputs, maxima and sums."""
    slots = 2 * num_sms
    if shape.run:
        slots = shape.num_tiles * shape.runs if shape.runs > 1 else 0
    return (
        Buffer((sum(record_sizes(shape, num_sms)),), torch.int32),
        Buffer((slots, 2, TILE_ROWS, 256), torch.float32),
        Buffer((slots, 2, TILE_ROWS), torch.float32),
    )


def record_sizes(shape: PlanShape, num_sms: int) -> tuple[int, int, int]:
    """Count the ints of the records: program (one an SM), entry, merge."""
    merges = 1 + max(num_sms, shape.num_tiles)
    return (
        num_sms * PROGRAM_FIELDS,
        (3 * shape.num_requests + 1) * RECORD_FIELDS,
        merges * RECORD_FIELDS,
    )
