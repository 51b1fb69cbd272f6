"""Launch of the Hopper kernel and of the merge after it."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.hopper.bounds import TILE_ROWS
from specmla.kernels.hopper.kernel import hopper_kernel
from specmla.kernels.hopper.layouts import COPY
from specmla.kernels.hopper.plan import HopperPlan
from specmla.kernels.hopper.small.kernel import REGISTERS as SMALL_REGISTERS
from specmla.kernels.hopper.small.kernel import small_kernel
from specmla.kernels.launch import FP_FUSION
from specmla.kernels.merge import WARPS, merge_kernel
from specmla.kernels.prepared import Launch
from specmla.kernels.prims import LOG2_E
from specmla.kernels.schedule_line import MERGE_PROGRAMS_PER_SM
from specmla.kernels.tensor_box import BoxedTensor, tensor_box
from specmla.metadata import VerifyPart

MERGE_REGISTERS = 128
"""Of a thread of the merge, so that all its programs are resident at once."""
REGISTERS = 168
"""Registers a thread at launch; the partitions redistribute them."""
HOPPER, MERGE = DirectKernel(hopper_kernel), DirectKernel(merge_kernel)
SMALL = DirectKernel(small_kernel)


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
    lines = min(latent_cache.shape[1], TILE_ROWS)
    cache = BoxedTensor(latent_cache, tensor_box((1, lines, 64), COPY.value))
    inputs, outputs = (q_latent, q_rope, cache), (out, lse)
    all_launches = launches(outputs, inputs, part, plan, softmax_scale)
    started = [launch.run() for launch in all_launches]
    plan.repeat.remember(all_launches, started, inputs, outputs, part, softmax_scale)
    return out, lse


def launches(
    outputs: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, BoxedTensor],
    part: VerifyPart,
    plan: HopperPlan,
    softmax_scale: float,
) -> list[Launch]:
    """Give the launches of one call: the main kernel, then the merge."""
    main = _main_launch(outputs, inputs, part, plan, softmax_scale)
    return [main, merge_launch(*outputs, plan)]


def _main_launch(
    outputs: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, BoxedTensor],
    part: VerifyPart,
    plan: HopperPlan,
    softmax_scale: float,
) -> Launch:
    q_latent, q_rope, _ = inputs
    # A table that a mask does not use stands for itself: pointers can't be None in a partition.
    unused = part.row_extent
    args = (
        *outputs,
        plan.partial_out,
        plan.partial_stat,
        *inputs,
        part.block_table,
        part.row_extent,
        unused if part.row_start is None else part.row_start,
        unused if part.tree_bits is None else part.tree_bits,
        plan.program,
        plan.entry,
        plan.merge,
        softmax_scale * LOG2_E,
        part.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
    )
    num_heads, grid = q_latent.shape[1], (plan.program.shape[0],)
    named = {
        "H": num_heads,
        "G": part.page_size,
        "WINDOW": part.row_start is not None,
        "TREE": part.tree_bits is not None,
        "num_warps": 4,
        "enable_fp_fusion": FP_FUSION,
        "launch_pdl": True,
    }
    small = small_rows(part.max_query_len * num_heads, plan.shape.run)
    if small is not None:
        named |= {"N": small, "maxnreg": SMALL_REGISTERS[small]}
        return Launch(SMALL, grid, args, named)
    return Launch(HOPPER, grid, args, named | {"RUN": plan.shape.run, "maxnreg": REGISTERS})


def small_rows(most_rows: int, run: int) -> int | None:
    """Choose the rows of a pass of the form for few rows; None for tiles of 64.

    Either form is right for any rows: the bound only says which is faster. Batch-invariant results
    come from one form whatever the query lengths.

    Args:
        most_rows: bound of the packed rows of a request, Q * H.
        run: blocks of a batch-invariant piece, or 0.
    """
    return None if run else next((n for n in SMALL_REGISTERS if most_rows <= n), None)


def merge_launch(out: Tensor, lse: Tensor, plan: HopperPlan) -> Launch:
    """Give the launch that merges the pieces of cut tiles."""
    named = {
        "INVARIANT": plan.shape.run > 0,
        "num_warps": WARPS,
        "maxnreg": MERGE_REGISTERS,
        "enable_fp_fusion": FP_FUSION,
        "launch_pdl": True,
    }
    args = (plan.partial_out, plan.partial_stat, plan.merge, out, lse)
    return Launch(MERGE, (plan.program.shape[0] * MERGE_PROGRAMS_PER_SM.value,), args, named)
