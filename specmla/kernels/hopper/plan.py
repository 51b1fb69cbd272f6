"""The plan of a step for the Hopper kernel: records that the device fills, and scratch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
from torch import Tensor

from specmla.kernels.launch import describe_device
from specmla.kernels.schedule import schedule_kernel
from specmla.metadata import VerifyPart

TILE_ROWS = 64
BLOCK_KEYS = 64
FIXED_COST = 2
"""Cost of a piece in blocks of 64 keys: its queries, its output, its start."""
MERGE_COST = 5
"""Blocks by which whole jobs may exceed cut ones before cutting and merging pays."""
MIN_BLOCKS = 1


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


@dataclass(frozen=True)
class HopperPlan:
    """Records and scratch of a step, on the device, shared by all layers.

    Attributes:
        shape: that it was made for.
        program, entry, merge: int32 records, see `schedule.py`.
        partial_out: [slots, 2, 64, 256] float32, two slots an SM, or one for each run of each tile.
        partial_lse: [slots, 64] float32, base 2.
    """

    shape: PlanShape
    program: Tensor
    entry: Tensor
    merge: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def make_plan(part: VerifyPart, num_heads: int, run: int) -> HopperPlan:
    """Reserve a step's records and scratch, or take its plan's, and let the device fill them.

    Args:
        part: the step's verify rows; lengths are read on the device only.
        num_heads: H.
        run: blocks of 64 keys of a batch-invariant piece; 0 balances the pieces.
    """
    table_keys = part.block_table.shape[1] * part.page_size
    runs = -(-table_keys // (run * BLOCK_KEYS)) if run else 0
    shape = PlanShape(part.num_rows, part.num_requests, num_heads, run, runs)
    earlier, device = part.plan, part.seq_lens.device
    if isinstance(earlier, HopperPlan) and (earlier.shape, earlier.merge.device) == (shape, device):
        plan = earlier
    else:
        plan = _reserve(shape, device)
    programs = plan.program.shape[0]
    with torch.cuda.device_of(part.seq_lens):
        schedule_kernel[(1,)](
            part.query_start,
            part.seq_lens,
            plan.program,
            plan.entry,
            plan.merge,
            part.block_table,
            part.block_table.stride(0),
            part.num_requests,
            H=num_heads,
            PROGRAMS=programs,
            FIXED=FIXED_COST,
            MIN_BLOCKS=MIN_BLOCKS,
            MERGE_COST=MERGE_COST,
            RUN=run,
            G=part.page_size,
            BLOCK_B=triton.next_power_of_2(part.num_requests),
            BLOCK_P=triton.next_power_of_2(programs),
            num_warps=4,
        )
    return plan


def _reserve(shape: PlanShape, device: torch.device) -> HopperPlan:
    programs = describe_device(device).num_sms
    slots = 2 * programs
    if shape.run:
        slots = shape.num_tiles * shape.runs if shape.runs > 1 else 0
    sizes = (programs * 16, (3 * shape.num_requests + 1) * 8)
    merges = 1 + max(programs, shape.num_tiles)
    records = torch.empty(sum(sizes) + merges * 8, dtype=torch.int32, device=device)
    program, entry, merge = records.split((*sizes, merges * 8))
    return HopperPlan(
        shape,
        program.view(-1, 16),
        entry.view(-1, 8),
        merge.view(-1, 8),
        torch.empty(slots, 2, TILE_ROWS, 256, dtype=torch.float32, device=device),
        torch.empty(slots, TILE_ROWS, dtype=torch.float32, device=device),
    )
