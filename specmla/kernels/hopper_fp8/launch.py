"""Launch of the Hopper kernel for e4m3 caches and of the merge after it."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.fp8_rows import Fp8Rows
from specmla.kernels.hopper.bounds import TILE_ROWS
from specmla.kernels.hopper.launch import _merge_launch as merge_launch
from specmla.kernels.hopper.plan import HopperPlan
from specmla.kernels.hopper_fp8.kernel import hopper_fp8_kernel
from specmla.kernels.hopper_fp8.layouts import CODES_3D
from specmla.kernels.launch import FP_FUSION
from specmla.kernels.prepared import Launch
from specmla.kernels.prims import LOG2_E
from specmla.kernels.tensor_box import BoxedTensor, tensor_box
from specmla.metadata import VerifyPart

REGISTERS = 168
"""Registers a thread at launch; the partitions redistribute them."""
HOPPER_FP8 = DirectKernel(hopper_fp8_kernel)


def hopper_fp8_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    plan: HopperPlan,
    softmax_scale: float,
    rows: Fp8Rows,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel and the merge of cut tiles.

    Args:
        q_latent: [T, H, 512]. q_rope: [T, H, 64], bf16 or fp16. latent_cache: [N, G, 576] uint8;
            last strides 1, cache rows contiguous within a page (checked by the backend).
        part: the step's verify rows.
        plan: of the same step.
        softmax_scale: natural scale of the scores, positive.
        rows: 576 codes with one scale of all rows.

    Returns:
        Latents [T, H, 512] in the query's dtype and LSE [T, H] float32 (natural log).
    """
    num_rows, num_heads, rank = q_latent.shape
    out = q_latent.new_empty(num_rows, num_heads, rank)
    lse = q_latent.new_empty(num_rows, num_heads, dtype=torch.float32)
    if not num_rows:
        return out, lse
    lines = min(latent_cache.shape[1], TILE_ROWS)
    cache = BoxedTensor(latent_cache, tensor_box((1, lines, 64), CODES_3D.value))
    inputs, outputs = (q_latent, q_rope, cache), (out, lse)
    # The sums of weights, divided by the cache's scale, bring it to the outputs; the maxima take it
    # out of the LSE again.
    scales = softmax_scale * LOG2_E * rows.scale, 1 / rows.scale, log2(rows.scale)
    main = _main_launch(outputs, inputs, part, plan, scales)
    launches = [main, merge_launch(*outputs, plan)]
    started = [launch.run() for launch in launches]
    plan.repeat.remember(launches, started, inputs, outputs, part, softmax_scale)
    return out, lse


def _main_launch(
    outputs: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, BoxedTensor],
    part: VerifyPart,
    plan: HopperPlan,
    scales: tuple[float, float, float],
) -> Launch:
    q_latent, q_rope, cache = inputs
    # A table that a mask does not use stands for itself: pointers can't be None in a partition.
    unused = part.row_extent
    args = (
        *outputs,
        plan.partial_out,
        plan.partial_stat,
        *inputs,
        cache.tensor,
        part.block_table,
        part.row_extent,
        unused if part.row_start is None else part.row_start,
        unused if part.tree_bits is None else part.tree_bits,
        plan.program,
        plan.entry,
        plan.merge,
        *scales,
        cache.tensor.stride(0),
        part.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
    )
    named = {
        "H": q_latent.shape[1],
        "G": part.page_size,
        "RUN": plan.shape.run,
        "WINDOW": part.row_start is not None,
        "TREE": part.tree_bits is not None,
        "num_warps": 4,
        "maxnreg": REGISTERS,
        "enable_fp_fusion": FP_FUSION,
        "launch_pdl": True,
    }
    return Launch(HOPPER_FP8, (plan.program.shape[0],), args, named)
