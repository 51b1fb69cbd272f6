"""The plan of a step for the Hopper kernel: records that the device fills, and scratch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.hopper.bounds import (
    PROGRAM_FIELDS,
    RECORD_FIELDS,
    PlanShape,
    plan_buffers,
    plan_shape,
    record_sizes,
)
from specmla.kernels.hopper.repeat import RepeatedAttention
from specmla.kernels.launch import describe_device, next_power_of_2
from specmla.kernels.schedule import schedule_kernel
from specmla.metadata import VerifyPart

FIXED_COST = 2
"""Cost of a piece in blocks of 64 keys: its queries, its output, its start."""
MERGE_COST = 5
"""Blocks by which whole jobs may exceed cut ones before cutting and merging pays."""
MIN_BLOCKS = 1
SCHEDULE = DirectKernel(schedule_kernel)


@dataclass(frozen=True)
class HopperPlan:
    """Records and scratch of a step, on the device, shared by all layers.

    Attributes:
        shape: that it was made for.
        program, entry, merge: int32 records, see `schedule.py`.
        partial_out: [slots, 2, 64, 256] float32, two slots an SM, or one for each run of each tile.
        partial_stat: [slots, 2, 64] float32: largest base-2 score and sum of weights of each row.
        repeat: the last call on this plan, for further layers.
    """

    shape: PlanShape
    program: Tensor
    entry: Tensor
    merge: Tensor
    partial_out: Tensor
    partial_stat: Tensor
    repeat: RepeatedAttention = field(default_factory=RepeatedAttention, compare=False, repr=False)


def make_plan(part: VerifyPart, num_heads: int, run: int) -> HopperPlan:
    """Reserve a step's records and scratch, or take its plan's, and let the device fill them.

    Args:
        part: the step's verify rows; lengths are read on the device only.
        num_heads: H.
        run: blocks of 64 keys of a batch-invariant piece; 0 balances the pieces.
    """
    table_keys = part.block_table.shape[1] * part.page_size
    shape = plan_shape(part.num_rows, part.num_requests, num_heads, run, table_keys)
    earlier, device = part.plan, part.seq_lens.device
    if isinstance(earlier, HopperPlan) and (earlier.shape, earlier.merge.device) == (shape, device):
        plan = earlier
    else:
        plan = _reserve(shape, device)
    programs = plan.program.shape[0]
    with torch.cuda.device_of(part.seq_lens):
        SCHEDULE.launch(
            (1,),
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
            BLOCK_B=lanes_for(part.num_requests),
            BLOCK_P=next_power_of_2(programs),
            num_warps=4,
        )
    return plan


def lanes_for(num_requests: int) -> int:
    """Give the lanes for so many requests: 32, 128, 512 and so on.

    A form of the plan's kernel takes seconds to compile; steps of four make few of them.
    """
    lanes = 32
    while lanes < num_requests:
        lanes *= 4
    return lanes


def _reserve(shape: PlanShape, device: torch.device) -> HopperPlan:
    num_sms = describe_device(device).num_sms
    records, partial_out, partial_stat = (
        buffer.empty(device) for buffer in plan_buffers(shape, num_sms)
    )
    program, entry, merge = records.split(record_sizes(shape, num_sms))
    return HopperPlan(
        shape,
        program.view(-1, PROGRAM_FIELDS),
        entry.view(-1, RECORD_FIELDS),
        merge.view(-1, RECORD_FIELDS),
        partial_out,
        partial_stat,
    )
