"""Store: write new tokens' latent and rotated key as rows of the paged cache.

Slot s is row s % G of page s // G, at `s // G * page_stride + s % G * row_stride` in 64 bits: a
pool of 3.8 M tokens of 576 numbers already passes 2^31.
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

BLOCK_ROWS, BLOCK_COLS = 32, 64
# With four, one form (fp16, pages of one token) spills 8 bytes on sm_80.
NUM_WARPS = 8


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def store_kernel(
    pool_ptr,  # [N, G, A]
    kv_latent_ptr,  # [T, C]
    k_rope_ptr,  # [T, A - C]
    slots_ptr,  # [T] int64
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    stride_latent_t,
    stride_latent_c,
    stride_rope_t,
    stride_rope_r,
    G: tl.constexpr,
    C: tl.constexpr,
    A: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of BLOCK_ROWS tokens and BLOCK_COLS of their A columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    slot = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    is_latent = live[:, None] & (cols < C)[None, :]
    is_rope = live[:, None] & ((cols >= C) & (cols < A))[None, :]
    latent_at = rows[:, None] * stride_latent_t + cols[None, :] * stride_latent_c
    rope_at = rows[:, None] * stride_rope_t + (cols - C)[None, :] * stride_rope_r
    pool_at = (slot // G * stride_page + slot % G * stride_row)[:, None] + cols[None, :]
    # Two stores, one of them all masked off unless the tile straddles C: no select, no rounding.
    tl.store(pool_ptr + pool_at, tl.load(kv_latent_ptr + latent_at, mask=is_latent), mask=is_latent)
    tl.store(pool_ptr + pool_at, tl.load(k_rope_ptr + rope_at, mask=is_rope), mask=is_rope)


STORE = DirectKernel(store_kernel)


def store_rows(pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """Write `[kv_latent | k_rope]` rows ([T, C], [T, R]) at `slots` [T] of `pool` [N, G, C + R].

    Slots outside `0 .. N * G - 1` are skipped. The caller has checked shapes and dtypes.
    """
    num_rows, (num_pages, page_size, width) = slots.shape[0], pool.shape
    if num_rows == 0:
        return
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS))
    with torch.cuda.device_of(pool):
        STORE.launch(
            grid,
            pool,
            kv_latent.detach(),
            k_rope.detach(),
            slots.contiguous(),
            num_rows,
            num_pages * page_size,
            *pool.stride()[:2],
            *kv_latent.stride(),
            *k_rope.stride(),
            G=page_size,
            C=kv_latent.shape[1],
            A=width,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLS=BLOCK_COLS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def runs_on(device: torch.device) -> bool:
    """Whether these kernels can be launched for tensors of `device`."""
    # Under TRITON_INTERPRET=1 the decorator gives another class, which runs on any memory.
    return device.type == "cuda" or not isinstance(store_kernel, triton.JITFunction)


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    variants = (("bf16", 64, 512, 576), ("fp16", 1, 128, 128), ("fp32", 48, 256, 288))
    for element, page, rank, width in variants:
        constexprs = {"stride_latent_c": 1, "stride_rope_r": 1, "G": page, "C": rank, "A": width}
        constexprs |= {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS}
        signature = {"pool_ptr": f"*{element}", "kv_latent_ptr": f"*{element}"}
        signature |= {"k_rope_ptr": f"*{element}", "slots_ptr": "*i64"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in store_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((store_kernel, signature, constexprs, options))
    return out
