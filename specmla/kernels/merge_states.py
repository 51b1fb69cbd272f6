"""Merge of two attention states over disjoint keys, one of them in place: a pass over both.

As `specmla.lse_merge`: weights are exp(lse), an empty state (LSE -inf) changes no bit of the other
one whatever its output holds, two empty ones are 0 and -inf.
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

BLOCK_ROWS = 16
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    out_ptr,  # [T, H, V] float32, in place
    lse_ptr,  # [T, H] float32, in place
    got_ptr,  # [T, H, V]
    got_lse_ptr,  # [T, H] float32
    num_rows,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    stride_got_t,
    stride_got_h,
    stride_got_lse_t,
    stride_got_lse_h,
    H: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Merge BLOCK_ROWS of the T * H rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < num_rows
    t, h = row // H, row % H
    lse_at = lse_ptr + t * stride_lse_t + h * stride_lse_h
    got_lse_at = got_lse_ptr + t * stride_got_lse_t + h * stride_got_lse_h
    lse_a = tl.load(lse_at, mask=there, other=float("-inf"))
    lse_b = tl.load(got_lse_at, mask=there, other=float("-inf"))
    empty_a, empty_b = lse_a == float("-inf"), lse_b == float("-inf")
    top = tl.maximum(lse_a, lse_b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(lse_a - safe), tl.exp(lse_b - safe)
    total = weight_a + weight_b
    some = tl.where(total == 0.0, 1.0, total)
    share_a, share_b = weight_a / some, weight_b / some
    columns = tl.arange(0, V_PAD)
    used = there[:, None] & (columns < V)[None, :]
    out_at = (out_ptr + t * stride_out_t + h * stride_out_h)[:, None] + columns[None, :]
    got_at = (got_ptr + t * stride_got_t + h * stride_got_h)[:, None] + columns[None, :]
    # An empty state is not read: its output may be anything.
    a = tl.load(out_at, mask=used & (empty_a == 0)[:, None], other=0.0)
    b = tl.load(got_at, mask=used & (empty_b == 0)[:, None], other=0.0).to(tl.float32)
    merged = a * share_a[:, None] + b * share_b[:, None]
    merged = tl.where(empty_b[:, None], a, tl.where(empty_a[:, None], b, merged))
    tl.store(out_at, merged, mask=used)
    tl.store(lse_at, safe + tl.log(total), mask=there)


MERGE = DirectKernel(merge_states_kernel)


def merge_states_into(out: Tensor, lse: Tensor, got: Tensor, got_lse: Tensor) -> None:
    """Launch the merge.

    Args:
        out: [T, H, V] float32, written. lse: [T, H] float32, written.
        got: [T, H, V]. got_lse: [T, H] float32. Values with a last stride of 1.
    """
    num_rows, num_heads, width = out.shape
    if not num_rows:
        return
    total = num_rows * num_heads
    with torch.cuda.device_of(out):
        MERGE.launch(
            (triton.cdiv(total, BLOCK_ROWS),),
            out,
            lse,
            got,
            got_lse,
            total,
            *out.stride()[:2],
            *lse.stride(),
            *got.stride()[:2],
            *got_lse.stride(),
            H=num_heads,
            V=width,
            V_PAD=max(16, triton.next_power_of_2(width)),
            BLOCK_ROWS=BLOCK_ROWS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, heads, width in (("bf16", 128, 128), ("fp16", 40, 96), ("fp32", 16, 256)):
        constexprs = {"H": heads, "V": width, "V_PAD": triton.next_power_of_2(width)}
        constexprs |= {"BLOCK_ROWS": BLOCK_ROWS}
        signature = dict.fromkeys(("out_ptr", "lse_ptr", "got_lse_ptr"), "*fp32")
        signature |= {"got_ptr": f"*{element}"} | dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in merge_states_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((merge_states_kernel, signature, constexprs, options))
    return out
