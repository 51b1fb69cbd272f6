"""Plan and launch of the Hopper kernel: device-side schedule, main kernel, merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specmla.kernels.hopper.kernel import hopper_kernel
from specmla.kernels.hopper.layouts import COPY
from specmla.kernels.launch import FP_FUSION, describe_device
from specmla.kernels.merge import merge_kernel
from specmla.kernels.prims import LOG2_E
from specmla.kernels.schedule import schedule_kernel
from specmla.metadata import VerifyPart

TILE_ROWS = 64
FIXED_COST = 3
"""Cost of a piece in blocks of 64 keys: its queries, its output, its start."""
MERGE_COST = 5
"""Blocks by which whole jobs may exceed cut ones before cutting and merging pays."""
MIN_BLOCKS = 2
MERGE_PROGRAMS_PER_SM = 8
EARLY = False
TURN = False
REGISTERS = 168
"""Registers a thread at launch; the partitions redistribute them."""


@dataclass(frozen=True)
class HopperPlan:
    """Records and scratch of a step, on the device, shared by all layers.

    Attributes:
        num_heads: H that it was made for.
        program, entry, merge: int32 records, see `schedule.py`.
        partial_out: [2 * SMs, 2, 64, 256] float32. partial_lse: [2 * SMs, 64] float32, base 2.
    """

    num_heads: int
    program: Tensor
    entry: Tensor
    merge: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def make_plan(part: VerifyPart, num_heads: int) -> HopperPlan:
    """Allocate a step's records and scratch and let the device fill the records.

    Args:
        part: the step's verify rows; lengths are read on the device only.
        num_heads: H.
    """
    device, requests = part.seq_lens.device, part.num_requests
    programs = describe_device(device).num_sms
    tiles = sum(-(-q * num_heads // TILE_ROWS) for q in part.query_lens)
    plan = HopperPlan(
        num_heads,
        torch.empty(programs, 16, dtype=torch.int32, device=device),
        torch.empty(3 * requests + 1, 8, dtype=torch.int32, device=device),
        torch.empty(1 + max(programs, tiles), 8, dtype=torch.int32, device=device),
        torch.empty(2 * programs, 2, TILE_ROWS, 256, dtype=torch.float32, device=device),
        torch.empty(2 * programs, TILE_ROWS, dtype=torch.float32, device=device),
    )
    with torch.cuda.device_of(part.seq_lens):
        schedule_kernel[(1,)](
            part.query_start,
            part.seq_lens,
            plan.program,
            plan.entry,
            plan.merge,
            requests,
            H=num_heads,
            PROGRAMS=programs,
            FIXED=FIXED_COST,
            MIN_BLOCKS=MIN_BLOCKS,
            MERGE_COST=MERGE_COST,
            RUN=0,
            MAX_TILES=0,
            BLOCK_B=triton.next_power_of_2(requests),
            BLOCK_P=triton.next_power_of_2(programs),
            num_warps=4,
        )
    return plan


def hopper_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    plan: HopperPlan,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the main kernel and the merge of cut tiles.

    Args:
        q_latent: [T, H, 512]. q_rope: [T, H, 64]. latent_cache: [N, G, 576], bf16 or fp16, one
            dtype; last strides 1, cache rows contiguous within a page (checked by the backend).
        part: the step's verify rows.
        plan: of the same step.
        softmax_scale: natural scale of the scores, positive.

    Returns:
        Latents [T, H, 512] in the query's dtype and LSE [T, H] float32 (natural log).
    """
    num_rows, num_heads, rank = q_latent.shape
    out = q_latent.new_empty(num_rows, num_heads, rank)
    lse = q_latent.new_empty(num_rows, num_heads, dtype=torch.float32)
    if not num_rows:
        return out, lse
    programs = plan.program.shape[0]
    lines = min(latent_cache.shape[1], TILE_ROWS)
    descriptor = TensorDescriptor(
        latent_cache,
        list(latent_cache.shape),
        list(latent_cache.stride()),
        [1, lines, 64],
        COPY.value,
    )
    # A table that a mask does not use stands for itself: pointers can't be None in a partition.
    unused = part.row_extent
    hopper_kernel[(programs,)](
        out,
        lse,
        plan.partial_out,
        plan.partial_lse,
        q_latent,
        q_rope,
        descriptor,
        part.block_table,
        part.row_extent,
        unused if part.row_start is None else part.row_start,
        unused if part.tree_bits is None else part.tree_bits,
        plan.program,
        plan.entry,
        softmax_scale * LOG2_E,
        part.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        H=num_heads,
        G=part.page_size,
        RUN=0,
        WINDOW=part.row_start is not None,
        TREE=part.tree_bits is not None,
        EARLY=EARLY,
        TURN=TURN,
        num_warps=4,
        maxnreg=REGISTERS,
        enable_fp_fusion=FP_FUSION,
    )
    merge_kernel[(programs * MERGE_PROGRAMS_PER_SM,)](
        plan.partial_out,
        plan.partial_lse,
        plan.merge,
        out,
        lse,
        PDL=True,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
        launch_pdl=True,
    )
    return out, lse
