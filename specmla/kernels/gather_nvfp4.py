"""Gather rows of `nvfp4_ds_mla`: read and dequantise them into one contiguous buffer."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.e2m1 import decode_e2m1
from specmla.kernels.e4m3 import decode_e4m3
from specmla.kernels.store_nvfp4 import Nvfp4Rows

BLOCK_ROWS, BLOCK_COLS = 32, 64
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def gather_nvfp4_kernel(
    out_ptr,  # [n, A], contiguous
    pool_ptr,  # [N, G, bytes] uint8
    slots_ptr,  # [n] int64
    scale,
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    G: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of BLOCK_ROWS rows and BLOCK_COLS of their C + R columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    slot = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    row_at = pool_ptr + (slot // G * stride_page + slot % G * stride_row)[:, None]
    is_latent = (cols < C)[None, :]
    byte = tl.where(cols < C, cols // 2, cols - C // 2)[None, :]
    inside = live[:, None] & (cols < C + R)[None, :]
    code = tl.load(row_at + byte, mask=inside, other=0)
    group_at = row_at + (C // 2 + R) + (cols // 16)[None, :]
    group = decode_e4m3(tl.load(group_at, mask=live[:, None] & is_latent, other=0))
    half = (code.to(tl.int32) >> ((cols & 1) * 4)[None, :]) & 15
    # The first product is exact (2 and 4 significant bits), so there is one rounding.
    value = tl.where(is_latent, decode_e2m1(half) * group, decode_e4m3(code))
    if SCALED:
        value = value * scale
    out_at = rows[:, None] * (C + R) + cols[None, :]
    inside = (rows < num_rows)[:, None] & (cols < C + R)[None, :]
    tl.store(out_ptr + out_at, value.to(out_ptr.dtype.element_ty), mask=inside)


GATHER_NVFP4 = DirectKernel(gather_nvfp4_kernel)


def gather_nvfp4_rows(form: Nvfp4Rows, pool: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Read rows at `slots` [n] of `pool` [N, G, bytes] uint8 into `out` [n, A], contiguous.

    A slot outside the pool gives zeros. Products are computed in float32.
    """
    (num_rows, width), (num_pages, page_size, _) = out.shape, pool.shape
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS))
    with torch.cuda.device_of(pool):
        GATHER_NVFP4.launch(
            grid,
            out,
            pool,
            slots.contiguous(),
            form.scale,
            num_rows,
            num_pages * page_size,
            *pool.stride()[:2],
            G=page_size,
            C=form.rank,
            R=form.rope,
            SCALED=form.scale != 1.0,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLS=BLOCK_COLS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, scaled in (("bf16", True), ("fp16", False), ("fp32", False)):
        constexprs: dict[str, Any] = {"G": 64, "C": 512, "R": 64, "SCALED": scaled}
        constexprs |= {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS}
        signature = {"out_ptr": f"*{element}", "pool_ptr": "*u8", "slots_ptr": "*i64"}
        signature |= {"scale": "fp32"} | dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in gather_nvfp4_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((gather_nvfp4_kernel, signature, constexprs, options))
    return out
