"""Root mean square norm of rows, each by one program: a row's bits don't depend on the others.

A general reduction may share a row out by how many rows there are; this one never does.
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
from specmla.kernels.launch import next_power_of_2

NUM_WARPS = 8


@triton.jit
def norm_kernel(
    out_ptr,  # [T, D] contiguous
    x_ptr,  # [T, D], last stride 1
    weight_ptr,  # [D], or None
    eps,
    stride_x,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: `w * x / sqrt(mean(x^2) + eps)` in float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < D
    x = tl.load(x_ptr + row * stride_x + at, mask=held, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    if weight_ptr is not None:
        x = x * tl.load(weight_ptr + at, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + at, x.to(out_ptr.dtype.element_ty), mask=held)


NORM = DirectKernel(norm_kernel)


def norm_rows(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm rows `[T, D]` of bfloat16, float16 or float32; `weight` [D] contiguous or None."""
    num_rows, width = x.shape
    out = x.new_empty(num_rows, width)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    with torch.cuda.device_of(x):
        NORM.launch(
            (num_rows,),
            out,
            x.detach(),
            None if weight is None else weight.detach(),
            eps,
            x.stride(0),
            D=width,
            BLOCK=next_power_of_2(width),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, width in (("bf16", 7168), ("fp16", 512), ("fp32", 200)):
        constexprs = {"D": width, "BLOCK": triton.next_power_of_2(width)}
        signature = dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr"), f"*{element}")
        signature |= dict.fromkeys(constexprs, "constexpr") | {"eps": "fp32", "stride_x": "i32"}
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((norm_kernel, signature, constexprs, options))
    return out
