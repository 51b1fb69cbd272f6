"""Weighted sums over the experts of each token, in the order of their choice.

A general reduction may order its terms by how many rows there are; this one never does.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel

BLOCK = 1024
"""Columns of a program."""
NUM_WARPS = 4


@triton.jit
def expert_sum_kernel(
    out_ptr,  # [T, D] contiguous
    pair_ptr,  # [T, COUNT, D] contiguous
    weight_ptr,  # [T, COUNT] contiguous
    D: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row, summed in float32, first choice first, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < D
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in range(COUNT):
        pair = row * COUNT + choice
        weight = tl.load(weight_ptr + pair).to(tl.float32)
        values = tl.load(pair_ptr + pair * D + column, mask=held, other=0.0)
        acc += values.to(tl.float32) * weight
    tl.store(out_ptr + row * D + column, acc.to(out_ptr.dtype.element_ty), mask=held)


EXPERT_SUM = DirectKernel(expert_sum_kernel)


def expert_sum(pairs: Tensor, weights: Tensor) -> Tensor:
    """Sum what the experts of each token gave.

    Args:
        pairs: [T, k, D] contiguous, of bfloat16, float16 or float32.
        weights: [T, k] contiguous, one of these too.

    Returns:
        [T, D] of the dtype of `pairs`.
    """
    num_rows, count, width = pairs.shape
    out = pairs.new_empty(num_rows, width)
    if not out.numel():
        return out
    with torch.cuda.device_of(pairs):
        EXPERT_SUM.launch(
            (num_rows, triton.cdiv(width, BLOCK)),
            out,
            pairs.detach(),
            weights.detach(),
            D=width,
            COUNT=count,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, width, count in (("bf16", 7168, 8), ("fp16", 5120, 6), ("fp32", 200, 3)):
        constexprs = {"D": width, "COUNT": count, "BLOCK": BLOCK}
        signature = {"out_ptr": f"*{element}", "pair_ptr": f"*{element}", "weight_ptr": "*fp32"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((expert_sum_kernel, signature, constexprs, options))
    return out
