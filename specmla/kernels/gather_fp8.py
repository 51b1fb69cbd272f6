"""Gather rows of e4m3 codes: read and dequantise them into one contiguous buffer."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.e4m3 import decode_e4m3
from specmla.kernels.fp8_rows import Fp8Rows

BLOCK_ROWS, BLOCK_COLS = 32, 64
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def gather_fp8_kernel(
    out_ptr,  # [n, A], contiguous
    pool_ptr,  # [N, G, bytes] uint8
    scales_ptr,  # the same memory as float32, or None
    rope_ptr,  # the same memory as bf16, or None
    slots_ptr,  # [n] int64
    scale,
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    G: tl.constexpr,
    A: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of BLOCK_ROWS rows and BLOCK_COLS of their A columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    slot = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    row_at = (slot // G * stride_page + slot % G * stride_row)[:, None]
    is_code = live[:, None] & (cols < CODES)[None, :]
    value = decode_e4m3(tl.load(pool_ptr + row_at + cols[None, :], mask=is_code, other=0))
    if GROUP > 0:
        scales_at = row_at // 4 + SCALES_AT + (cols // GROUP)[None, :]
        value = value * tl.load(scales_ptr + scales_at, mask=is_code, other=0.0)
    elif SCALED:
        value = value * scale
    if CODES < A:
        is_rope = live[:, None] & ((cols >= CODES) & (cols < A))[None, :]
        rope_at = row_at // 2 + ROPE_AT + (cols - CODES)[None, :]
        rope = tl.load(rope_ptr + rope_at, mask=is_rope, other=0.0).to(tl.float32)
        value = tl.where((cols < CODES)[None, :], value, rope)
    out_at = rows[:, None] * A + cols[None, :]
    inside = (rows < num_rows)[:, None] & (cols < A)[None, :]
    tl.store(out_ptr + out_at, value.to(out_ptr.dtype.element_ty), mask=inside)


GATHER_FP8 = DirectKernel(gather_fp8_kernel)


def gather_fp8_rows(form: Fp8Rows, pool: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Read rows at `slots` [n] of `pool` [N, G, bytes] uint8 into `out` [n, A], contiguous.

    A slot outside the pool gives zeros. Products are computed in float32.
    """
    (num_rows, width), (num_pages, page_size, _) = out.shape, pool.shape
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS))
    with torch.cuda.device_of(pool):
        GATHER_FP8.launch(
            grid,
            out,
            pool,
            pool.view(torch.float32) if form.group else None,
            pool.view(torch.bfloat16) if form.codes < width else None,
            slots.contiguous(),
            form.scale,
            num_rows,
            num_pages * page_size,
            *pool.stride()[:2],
            G=page_size,
            A=width,
            CODES=form.codes,
            GROUP=form.group,
            SCALES_AT=form.scales_at,
            ROPE_AT=form.rope_at,
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
    forms = (
        (Fp8Rows(576, scale=0.5), "bf16"),
        (Fp8Rows(576), "fp16"),
        (Fp8Rows(512, 128, 128, rope_at=264), "bf16"),
        (Fp8Rows(576, 576, 144, 2), "fp32"),
    )
    for form, element in forms:
        constexprs: dict[str, Any] = {"G": 64, "A": 576, "CODES": form.codes, "GROUP": form.group}
        constexprs |= {"SCALES_AT": form.scales_at, "ROPE_AT": form.rope_at}
        constexprs |= {"SCALED": form.scale != 1.0}
        constexprs |= {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS}
        signature = {"out_ptr": f"*{element}", "pool_ptr": "*u8", "slots_ptr": "*i64"}
        signature |= {"scales_ptr": "*fp32", "rope_ptr": "*bf16", "scale": "fp32"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in gather_fp8_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((gather_fp8_kernel, signature, constexprs, options))
    return out
