"""Launch of the kernel for few rows over e4m3 caches, and of the merge after it."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.hopper.bounds import TILE_ROWS
from specmla.kernels.hopper.launch import merge_launch
from specmla.kernels.hopper.plan import HopperPlan
from specmla.kernels.hopper.small_fp8.kernel import REGISTERS, small_fp8_kernel
from specmla.kernels.hopper.small_fp8.layouts import CODES_3D, WIDTH
from specmla.kernels.launch import FP_FUSION
from specmla.kernels.prepared import Launch
from specmla.kernels.prims import LOG2_E
from specmla.kernels.tensor_box import BoxedTensor, tensor_box
from specmla.metadata import VerifyPart

SMALL_FP8 = DirectKernel(small_fp8_kernel)
PASS_ROWS = (16, 32)
"""Rows of a pass; a request may have more, at a pass over its keys for each so many."""


def small_fp8_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    plan: HopperPlan,
    softmax_scale: float,
    cache_scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the main kernel and the merge of cut tiles.

    Args:
        q_latent: [T, H, 512]. q_rope: [T, H, 64], bf16 or fp16. latent_cache: [N, G, 576] uint8,
            e4m3 codes; last strides 1, cache rows contiguous within a page, 16 divides the address
            and the stride of pages.
        part: the step's verify rows.
        plan: of the same step.
        softmax_scale: natural scale of the scores, positive.
        cache_scale: what a code of 1 stands for, positive.

    Returns:
        Latents [T, H, 512] in the query's dtype and LSE [T, H] float32 (natural log).
    """
    num_rows, num_heads, rank = q_latent.shape
    out = q_latent.new_empty(num_rows, num_heads, rank)
    lse = q_latent.new_empty(num_rows, num_heads, dtype=torch.float32)
    if not num_rows:
        return out, lse
    lines = min(latent_cache.shape[1], TILE_ROWS)
    cache = BoxedTensor(latent_cache, tensor_box((1, lines, WIDTH.value), CODES_3D.value))
    scales = (softmax_scale * LOG2_E * cache_scale, 1 / cache_scale, log2(cache_scale))
    _main_launch((out, lse), (q_latent, q_rope, cache), part, plan, scales).run()
    merge_launch(out, lse, plan).run()
    return out, lse


def _main_launch(
    outputs: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, BoxedTensor],
    part: VerifyPart,
    plan: HopperPlan,
    scales: tuple[float, float, float],
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
        *scales,
        part.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
    )
    num_heads = q_latent.shape[1]
    most = part.max_query_len * num_heads
    named = {
        "H": num_heads,
        "G": part.page_size,
        "WINDOW": part.row_start is not None,
        "TREE": part.tree_bits is not None,
        "N": next((n for n in PASS_ROWS if most <= n), PASS_ROWS[-1]),
        "num_warps": 4,
        "maxnreg": REGISTERS,
        "enable_fp_fusion": FP_FUSION,
        "launch_pdl": True,
    }
    return Launch(SMALL_FP8, (plan.program.shape[0],), args, named)
