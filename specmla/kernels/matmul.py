"""Products of rows and weights whose bits don't depend on how many rows there are.

One tile form for any number of rows: the same shape, the same order of the K products, no split of
K. A row is a row of some tile, and what the others of it hold does not reach it.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.launch import describe_device


class Tile(NamedTuple):
    """Rows, columns and products of a step of one program, and its launch options."""

    rows: int
    columns: int
    products: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["bias_ptr"])
def matmul_kernel(
    out_ptr,  # [T, H, N]
    x_ptr,  # [T, H, K], last stride 1
    weight_ptr,  # [H, K, N]
    bias_ptr,  # [N], or None; of one H only
    num_rows,
    stride_out_t,
    stride_out_h,
    stride_x_t,
    stride_x_h,
    stride_weight_h,
    stride_weight_k,
    stride_weight_n,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of BLOCK_M rows and BLOCK_N columns of a head."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    alive, held = (rows < num_rows)[:, None], (cols < N)[None, :]
    x_at = (x_ptr + head * stride_x_h + rows * stride_x_t)[:, None]
    weight_at = (weight_ptr + head * stride_weight_h + cols * stride_weight_n)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + k[None, :], mask=alive & (k < K)[None, :], other=0.0)
        at = weight_at + k.to(tl.int64)[:, None] * stride_weight_k
        weight = tl.load(at, mask=(k < K)[:, None] & held, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out_at = (out_ptr + rows * stride_out_t + head * stride_out_h)[:, None] + cols[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=alive & held)


MATMUL = DirectKernel(matmul_kernel)


def find_tile(arch: str, itemsize: int) -> Tile:
    """Give the tile of an architecture and of elements of that many bytes; not of any row count."""
    if arch == "interpreter":
        return Tile(64, 128, 128, 4, 1)
    if itemsize == 4:
        return Tile(16, 64, 32, 8, 1)
    return Tile(64, 64, 64, 4, 1) if arch.startswith("gfx") else Tile(64, 64, 128, 4, 3)


def matmul_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows `[T, H, K]` by `[H, K, N]`, head by head, to `[T, H, N]` contiguous.

    Args:
        x: bfloat16, float16 or float32; any strides, copied where the last one is not 1.
        weight: of the same dtype, any strides.
        bias: [N], added before the sum is rounded; with H = 1.
    """
    num_rows, heads, inner = x.shape
    width = weight.shape[2]
    out = x.new_empty(num_rows, heads, width)
    if not out.numel():
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    tile = find_tile(describe_device(x.device).arch, x.element_size())
    with torch.cuda.device_of(x):
        MATMUL.launch(
            (triton.cdiv(num_rows, tile.rows), triton.cdiv(width, tile.columns), heads),
            out,
            x.detach(),
            weight.detach(),
            None if bias is None else bias.detach(),
            num_rows,
            *out.stride()[:2],
            *x.stride()[:2],
            *weight.stride(),
            N=width,
            K=inner,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.products,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )
    return out


def aot_variants(arch: str = "sm_90") -> list[tuple[Any, dict[str, str], dict[str, Any], Any]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    # A projection with bias, absorption (contiguous columns), the lift, widths of no whole tile.
    forms: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
        ("bf16", 7168, 2048, {"stride_weight_k": 1}),
        ("fp16", 512, 128, {"stride_weight_n": 1, "bias_ptr": None}),
        ("bf16", 128, 512, {"stride_weight_k": 1, "bias_ptr": None}),
        ("fp16", 200, 72, {"stride_weight_k": 1, "bias_ptr": None}),
        ("fp32", 200, 512, {"stride_weight_k": 1}),
    )
    for element, width, inner, fixed in forms:
        tile = find_tile(arch, 4 if element == "fp32" else 2)
        constexprs = fixed | {"N": width, "K": inner, "BLOCK_M": tile.rows}
        constexprs |= {"BLOCK_N": tile.columns, "BLOCK_K": tile.products}
        signature = dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr", "bias_ptr"), f"*{element}")
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in matmul_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        out.append((matmul_kernel, signature, constexprs, options | {"enable_fp_fusion": False}))
    return out
