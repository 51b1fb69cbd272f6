"""Quantise absorbed queries: latent and rotated part joined as one row of e4m3 codes a head."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.e4m3 import encode_e4m3

BLOCK_ROWS, BLOCK_COLS = 16, 128
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def quantise_query_kernel(
    out_ptr,  # [T, H, C + R] uint8, contiguous
    q_latent_ptr,  # [T, H, C]
    q_rope_ptr,  # [T, H, R]
    scale,
    num_rows,
    stride_latent_t,
    stride_latent_h,
    stride_rope_t,
    stride_rope_h,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of BLOCK_ROWS heads of tokens and BLOCK_COLS of their C + R columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    t, h = row // H, row % H
    alive = (row < num_rows)[:, None]
    latent_at = (q_latent_ptr + t * stride_latent_t + h * stride_latent_h)[:, None] + cols
    rope_at = (q_rope_ptr + t * stride_rope_t + h * stride_rope_h)[:, None] + (cols - C)
    latent = tl.load(latent_at, mask=alive & (cols < C), other=0.0).to(tl.float32)
    rope = tl.load(rope_at, mask=alive & (cols >= C) & (cols < C + R), other=0.0).to(tl.float32)
    value = tl.where(cols < C, latent, rope)
    if SCALED:
        value = tl.div_rn(value, scale)
    out_at = out_ptr + row[:, None] * (C + R) + cols
    tl.store(out_at, encode_e4m3(value), mask=alive & (cols < C + R))


QUANTISE_QUERY = DirectKernel(quantise_query_kernel)


def quantise_query_rows(q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
    """Give e4m3 codes [T, H, C + R] uint8 of [q_latent | q_rope] / scale.

    Args:
        q_latent: [T, H, C]. q_rope: [T, H, R]; last strides 1. scale: > 0.
    """
    num_rows, heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    shape = (num_rows, heads, rank + rope)
    out = torch.empty(shape, dtype=torch.uint8, device=q_latent.device)
    if not out.numel():
        return out
    grid = (triton.cdiv(num_rows * heads, BLOCK_ROWS), triton.cdiv(rank + rope, BLOCK_COLS))
    with torch.cuda.device_of(q_latent):
        QUANTISE_QUERY.launch(
            grid,
            out,
            q_latent.detach(),
            q_rope.detach(),
            scale,
            num_rows * heads,
            *q_latent.stride()[:2],
            *q_rope.stride()[:2],
            H=heads,
            C=rank,
            R=rope,
            SCALED=scale != 1.0,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLS=BLOCK_COLS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, scaled, rope in (("bf16", True, 64), ("fp16", False, 64), ("fp32", True, 0)):
        constexprs: dict[str, Any] = {"H": 16, "C": 512, "R": rope, "SCALED": scaled}
        constexprs |= {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS}
        signature = {"out_ptr": "*u8", "scale": "fp32"} | dict.fromkeys(constexprs, "constexpr")
        signature |= {"q_latent_ptr": f"*{element}", "q_rope_ptr": f"*{element}"}
        scalars = [name for name in quantise_query_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((quantise_query_kernel, signature, constexprs, options))
    return out
