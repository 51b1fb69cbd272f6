"""Gather: read rows of the paged cache into one contiguous buffer (context of a prompt's rows)."""

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
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def gather_kernel(
    out_ptr,  # [n, A], contiguous
    pool_ptr,  # [N, G, A]
    slots_ptr,  # [n] int64
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    G: tl.constexpr,
    A: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of BLOCK_ROWS rows and BLOCK_COLS of their A columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    slot = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    pool_at = (slot // G * stride_page + slot % G * stride_row)[:, None] + cols[None, :]
    inside = (cols < A)[None, :]
    found = tl.load(pool_ptr + pool_at, mask=live[:, None] & inside, other=0.0)
    out_at = rows[:, None] * A + cols[None, :]
    tl.store(out_ptr + out_at, found, mask=(rows < num_rows)[:, None] & inside)


GATHER = DirectKernel(gather_kernel)


def gather_rows(pool: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    """Read rows [n, A] at `slots` [n] of `pool` [N, G, A]; a slot outside the pool gives zeros.

    The rows are read into `out` [n, A], contiguous, if it is given.
    """
    num_rows, (num_pages, page_size, width) = slots.shape[0], pool.shape
    if out is None:
        out = pool.new_empty(num_rows, width)
    if num_rows == 0:
        return out
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS))
    with torch.cuda.device_of(pool):
        GATHER.launch(
            grid,
            out,
            pool,
            slots.contiguous(),
            num_rows,
            num_pages * page_size,
            *pool.stride()[:2],
            G=page_size,
            A=width,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLS=BLOCK_COLS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, page, width in (("bf16", 64, 576), ("fp16", 1, 128), ("fp32", 48, 288)):
        constexprs = {"G": page, "A": width, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS}
        signature = {"out_ptr": f"*{element}", "pool_ptr": f"*{element}", "slots_ptr": "*i64"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in gather_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((gather_kernel, signature, constexprs, options))
    return out
