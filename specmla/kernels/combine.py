"""Merge of split attention: partial outputs and their LSE into one row, in float32."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.launch import FP_FUSION, SplitPlan
from specmla.kernels.prims import MAX_FLOOR, live_splits

CHUNK = 4
"""Splits summed at a time; their loads are independent."""


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr"],
)
def combine_kernel(
    partial_ptr,  # [T, H, splits, C] float32, contiguous
    partial_lse_ptr,  # [T, H, splits] float32, contiguous
    out_ptr,  # [T, H, C]
    lse_ptr,  # [T, H] float32, contiguous
    query_start_ptr,  # [B + 1] int32, or None: one row a request
    seq_lens_ptr,  # [B] int32
    num_splits,
    stride_out_t,
    stride_out_h,
    H: tl.constexpr,
    C: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge one packed row; a row without keys becomes output 0 and LSE -inf."""
    row, request = tl.program_id(0), tl.program_id(1)
    first_row = request
    num_rows = 1
    if query_start_ptr is not None:
        first_row = tl.load(query_start_ptr + request)
        num_rows = tl.load(query_start_ptr + request + 1) - first_row
    if row >= num_rows * H:
        return
    live = live_splits(tl.load(seq_lens_ptr + request), num_splits, SPLIT_BLOCK)
    t = (first_row + row // H).to(tl.int64)
    h = (row % H).to(tl.int64)
    first = (t * H + h) * num_splits
    offs_c, lane = tl.arange(0, C), tl.arange(0, CHUNK)

    top = MAX_FLOOR
    total = 0.0
    acc = tl.zeros([C], tl.float32)
    for start in range(0, live, CHUNK):
        splits = start + lane
        held = splits < live
        lse = tl.load(partial_lse_ptr + first + splits, mask=held, other=float("-inf"))
        at = partial_ptr + (first + splits)[:, None] * C + offs_c[None, :]
        part = tl.load(at, mask=held[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        shrink = tl.exp(top - new_top)
        weight = tl.exp(lse - new_top)
        # An empty split may carry any bits: its weight is 0, and so must be its product.
        part = tl.where((weight > 0.0)[:, None], part, 0.0)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        top = new_top

    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    out_at = out_ptr + t * stride_out_t + h * stride_out_h + offs_c
    tl.store(out_at, (acc / safe).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + t * H + h, tl.where(empty, float("-inf"), top + tl.log(safe)))


def combine(
    out: Tensor,
    lse: Tensor,
    plan: SplitPlan,
    split_block: int,
    query_start: Tensor | None,
    seq_lens: Tensor,
    max_query_len: int,
) -> None:
    """Merge the plan's partial results into `out` [T, H, C] and `lse` [T, H].

    Args:
        out: any float dtype, last stride 1.
        lse: float32, contiguous.
        plan: holds the partials.
        split_block: keys of a step of the attention kernel, which the splits were cut by.
        query_start: [B + 1] int32, or None where every request is one row (B = T).
        seq_lens: [B] int32, the lengths that were split.
        max_query_len: host bound of the rows of a request.
    """
    assert plan.partial_out is not None
    assert plan.partial_lse is not None
    num_heads, rank = out.shape[1:]
    combine_kernel[(max_query_len * num_heads, seq_lens.shape[0])](
        plan.partial_out,
        plan.partial_lse,
        out,
        lse,
        query_start,
        seq_lens,
        plan.num_splits,
        out.stride(0),
        out.stride(1),
        H=num_heads,
        C=rank,
        SPLIT_BLOCK=split_block,
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )
