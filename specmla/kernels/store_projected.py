"""Norm, rotation and store in one kernel: from a projection's row to a row of the paged cache.

A row `[c' | k']` of the projection becomes `[w * c' / rms(c') | RoPE(k')]` at its slot, without the
three tensors in between. Squares, norm and rotation are computed in float32 and rounded once, to
the cache's dtype. Addresses as in `store`: 64-bit, the page stride from the tensor.
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

BLOCK_ROWS = 4
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def store_projected_kernel(
    pool_ptr,  # [N, G, C + R]
    row_ptr,  # [T, C + R], the projection
    weight_ptr,  # [C]
    cos_ptr,  # [T, R] float32, contiguous
    sin_ptr,  # [T, R] float32, signed
    slots_ptr,  # [T] int64
    eps,
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    stride_t,
    G: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # pairs (2i, 2i + 1); else (i, i + R / 2)
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Whole rows of BLOCK_ROWS tokens."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slot = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    to = (pool_ptr + slot // G * stride_page + slot % G * stride_row)[:, None]
    at = (row_ptr + rows * stride_t)[:, None]

    c = tl.arange(0, BLOCK_C)
    held = live[:, None] & (c < C)[None, :]
    latent = tl.load(at + c[None, :], mask=held, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, 1) / C + eps)
    weight = tl.load(weight_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    latent = latent * scale[:, None] * weight[None, :]
    tl.store(to + c[None, :], latent.to(pool_ptr.dtype.element_ty), mask=held)

    if R > 0:
        r = tl.arange(0, BLOCK_R)
        partner = r ^ 1 if INTERLEAVED else tl.where(r < R // 2, r + R // 2, r - R // 2)
        held = live[:, None] & (r < R)[None, :]
        key = tl.load(at + C + r[None, :], mask=held, other=0.0).to(tl.float32)
        other = tl.load(at + C + partner[None, :], mask=held, other=0.0).to(tl.float32)
        angle = rows[:, None] * R + r[None, :]
        cos = tl.load(cos_ptr + angle, mask=held, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=held, other=0.0)
        turned = key * cos + other * sin
        tl.store(to + C + r[None, :], turned.to(pool_ptr.dtype.element_ty), mask=held)


STORE_PROJECTED = DirectKernel(store_projected_kernel)


def store_projected_rows(
    pool: Tensor,
    projected: Tensor,
    weight: Tensor,
    angles: tuple[Tensor, Tensor],
    slots: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """Write normed and rotated rows at `slots` [T] of `pool` [N, G, C + R].

    Slots outside `0 .. N * G - 1` are skipped. The caller has checked shapes and dtypes.

    Args:
        pool: rows contiguous within a page.
        projected: [T, C + R], last stride 1.
        weight: [C] contiguous.
        angles: cos and signed sin, [T, R] float32 contiguous.
        slots: [T] int64.
        eps: of the norm.
        interleaved: how the rotated values pair up.
    """
    num_rows, (num_pages, page_size, width) = slots.shape[0], pool.shape
    if num_rows == 0:
        return
    rank = weight.shape[0]
    cos, sin = angles
    with torch.cuda.device_of(pool):
        STORE_PROJECTED.launch(
            (triton.cdiv(num_rows, BLOCK_ROWS),),
            pool,
            projected.detach(),
            weight.detach(),
            cos,
            sin,
            slots.contiguous(),
            eps,
            num_rows,
            num_pages * page_size,
            *pool.stride()[:2],
            projected.stride(0),
            G=page_size,
            C=rank,
            R=width - rank,
            INTERLEAVED=interleaved,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_C=next_power_of_2(rank),
            BLOCK_R=next_power_of_2(width - rank),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    variants = (
        ("bf16", 64, 512, 64, True),
        ("fp16", 1, 128, 0, True),
        ("fp32", 48, 200, 24, False),
    )
    for element, page, rank, rope, interleaved in variants:
        constexprs = {"G": page, "C": rank, "R": rope, "INTERLEAVED": int(interleaved)}
        constexprs |= {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_C": triton.next_power_of_2(rank)}
        constexprs |= {"BLOCK_R": triton.next_power_of_2(max(rope, 1))}
        signature = dict.fromkeys(("pool_ptr", "row_ptr", "weight_ptr"), f"*{element}")
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [n for n in store_projected_kernel.arg_names if n not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((store_projected_kernel, signature, constexprs, options))
    return out
