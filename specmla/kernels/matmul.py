"""Products of rows and weights whose bits don't depend on how many rows there are.

One tile form for any number of rows: the same shape, the same order of the K products, no split of
K. A row is a row of some tile, and what the others of it hold does not reach it.

Weights may be e4m3 codes. A step widens its part in registers: code times scale in float32, rounded
to the dtype of the rows, which is the number that `dequantise_into` would have stored.
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
from specmla.kernels.e4m3 import decode_e4m3
from specmla.kernels.launch import describe_device

SCALE_BLOCK = tl.constexpr(128)
"""Inputs of a weight that share a scale."""


class WeightScale(NamedTuple):
    """Scales of the codes of a weight.

    Attributes:
        values: [H, outputs of the layer, blocks of its inputs] float32, any strides.
        along_k: whether the layer's outputs are what is summed over (absorption), not the columns.
    """

    values: Tensor
    along_k: bool


class Tile(NamedTuple):
    """Rows, columns and products of a step of one program, and its launch options."""

    rows: int
    columns: int
    products: int
    num_warps: int
    num_stages: int


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["bias_ptr", "scale_ptr"]
)
def matmul_kernel(
    out_ptr,  # [T, H, N]
    x_ptr,  # [T, H, K], last stride 1
    weight_ptr,  # [H, K, N], uint8 codes if there are scales
    bias_ptr,  # [N], or None; of one H only
    scale_ptr,  # [H, K, N / 128] if ALONG_K, else [H, N, K / 128], float32; or None
    num_rows,
    stride_out_t,
    stride_out_h,
    stride_x_t,
    stride_x_h,
    stride_weight_h,
    stride_weight_k,
    stride_weight_n,
    stride_scale_h,
    stride_scale_o,
    stride_scale_i,
    N: tl.constexpr,
    K: tl.constexpr,
    ALONG_K: tl.constexpr,
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
    if scale_ptr is not None:
        scale_at = scale_ptr + head * stride_scale_h
        if ALONG_K:
            scale_at += tl.program_id(1).to(tl.int64) * BLOCK_N // SCALE_BLOCK * stride_scale_i
        else:
            scale_at += cols * stride_scale_o
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + k[None, :], mask=alive & (k < K)[None, :], other=0.0)
        at = weight_at + k.to(tl.int64)[:, None] * stride_weight_k
        weight = tl.load(at, mask=(k < K)[:, None] & held, other=0)
        if scale_ptr is not None:
            if ALONG_K:
                scale = tl.load(scale_at + k.to(tl.int64) * stride_scale_o, mask=k < K, other=0.0)
                widened = decode_e4m3(weight) * scale[:, None]
            else:
                block = start // SCALE_BLOCK * stride_scale_i
                scale = tl.load(scale_at + block, mask=cols < N, other=0.0)
                widened = decode_e4m3(weight) * scale[None, :]
            weight = widened.to(x.dtype)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out_at = (out_ptr + rows * stride_out_t + head * stride_out_h)[:, None] + cols[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=alive & held)


MATMUL = DirectKernel(matmul_kernel)


def find_tile(arch: str, itemsize: int, scaled: bool = False) -> Tile:
    """Give the tile of an architecture, of elements of that many bytes and of plain weights or
    codes; not of any row count.
    """
    if arch == "interpreter":
        return Tile(64, 128, 128, 4, 1)
    if itemsize == 4:
        return Tile(16, 64, 32, 8, 1)
    if arch.startswith("gfx"):
        return Tile(64, 64, 64, 4, 1)
    # Widening takes registers: with 4 warps one form spills on sm_100.
    return Tile(64, 64, 128, 8 if scaled else 4, 3)


def matmul_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: WeightScale | None = None
) -> Tensor:
    """Multiply rows `[T, H, K]` by `[H, K, N]`, head by head, to `[T, H, N]` contiguous.

    Args:
        x: bfloat16, float16 or float32; any strides, copied where the last one is not 1.
        weight: of the same dtype, or uint8 codes of e4m3; any strides.
        bias: [N], added before the sum is rounded; with H = 1.
        scale: of the codes, and only with them.
    """
    num_rows, heads, inner = x.shape
    width = weight.shape[2]
    out = x.new_empty(num_rows, heads, width)
    if not out.numel():
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    tile = find_tile(describe_device(x.device).arch, x.element_size(), scale is not None)
    with torch.cuda.device_of(x):
        MATMUL.launch(
            (triton.cdiv(num_rows, tile.rows), triton.cdiv(width, tile.columns), heads),
            out,
            x.detach(),
            weight.detach(),
            None if bias is None else bias.detach(),
            None if scale is None else scale.values.detach(),
            num_rows,
            *out.stride()[:2],
            *x.stride()[:2],
            *weight.stride(),
            *((0, 0, 0) if scale is None else scale.values.stride()),
            N=width,
            K=inner,
            ALONG_K=scale is not None and scale.along_k,
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
    # A projection with bias, absorption (contiguous columns), the lift, widths of no whole tile;
    # absorption, lift and a projection by codes.
    by_row, by_column = {"stride_weight_k": 1}, {"stride_weight_n": 1}
    forms: tuple[tuple[str, int, int, dict[str, Any], int | None], ...] = (
        ("bf16", 7168, 2048, by_row, None),
        ("fp16", 512, 128, by_column, None),
        ("bf16", 128, 512, by_row, None),
        ("fp16", 200, 72, by_row, None),
        ("fp32", 200, 512, by_row, None),
        ("bf16", 512, 128, by_column, 1),
        ("fp16", 512, 200, by_column, 1),
        ("bf16", 128, 512, by_row, 0),
        ("fp16", 4096, 512, by_row, 0),
        ("fp32", 512, 128, by_column, 1),
        ("fp32", 128, 512, by_row, 0),
    )
    for element, width, inner, fixed, along_k in forms:
        tile = find_tile(arch, 4 if element == "fp32" else 2, along_k is not None)
        constexprs = fixed | {"N": width, "K": inner, "BLOCK_M": tile.rows}
        constexprs |= {"BLOCK_N": tile.columns, "BLOCK_K": tile.products}
        constexprs |= {"ALONG_K": bool(along_k)} | ({} if width == 7168 else {"bias_ptr": None})
        constexprs |= {"scale_ptr": None} if along_k is None else {}
        signature = dict.fromkeys(("out_ptr", "x_ptr", "bias_ptr"), f"*{element}")
        signature |= {"weight_ptr": f"*{element}" if along_k is None else "*u8"}
        signature |= {"scale_ptr": "*fp32"} | dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in matmul_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        out.append((matmul_kernel, signature, constexprs, options | {"enable_fp_fusion": False}))
    return out
