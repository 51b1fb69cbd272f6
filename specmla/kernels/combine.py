"""Merge of split attention: partial outputs and their LSE into one row, in float32."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.launch import FP_FUSION, SplitPlan
from specmla.kernels.prims import MAX_FLOOR, live_splits

FEW_SPLITS = 8
"""Up to so many splits one program merges a whole row; beyond, rows are cut into column chunks."""

COLUMN_CHUNK = 128
"""Columns of a program that merges many splits."""

SPLIT_CHUNK = 32
"""Most splits that a program loads at a time."""


@triton.jit(
    do_not_specialize=["num_splits", "max_rows"],
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
    max_rows,  # packed rows of the largest request
    stride_out_t,
    stride_out_h,
    H: tl.constexpr,
    C: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge some columns of one packed row; a row without keys becomes output 0 and LSE -inf."""
    request, row = tl.program_id(0) // max_rows, tl.program_id(0) % max_rows
    chunk = tl.program_id(1)
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

    every = tl.arange(0, MAX_SPLITS)
    lse = tl.load(partial_lse_ptr + first + every, mask=every < live, other=float("-inf"))
    top = tl.maximum(tl.max(lse, axis=0), MAX_FLOOR)
    total = tl.sum(tl.exp(lse - top), axis=0)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)

    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, live, SPLIT_CHUNK):
        splits = start + tl.arange(0, SPLIT_CHUNK)
        held = splits < live
        part_lse = tl.load(partial_lse_ptr + first + splits, mask=held, other=float("-inf"))
        weight = tl.exp(part_lse - top)[:, None]
        at = partial_ptr + (first + splits)[:, None] * C + columns[None, :]
        part = tl.load(at, mask=held[:, None], other=0.0)
        # An empty split may carry any bits: its weight is 0, and so must be its product.
        acc += tl.sum(tl.where(weight > 0.0, part, 0.0) * weight, axis=0)

    out_at = out_ptr + t * stride_out_t + h * stride_out_h + columns
    tl.store(out_at, (acc / safe).to(out_ptr.dtype.element_ty))
    if chunk == 0:
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
    most = 1 << (plan.num_splits - 1).bit_length()
    columns = rank if most <= FEW_SPLITS else min(rank, COLUMN_CHUNK)
    max_rows = max_query_len * num_heads
    combine_kernel[(seq_lens.shape[0] * max_rows, rank // columns)](
        plan.partial_out,
        plan.partial_lse,
        out,
        lse,
        query_start,
        seq_lens,
        plan.num_splits,
        max_rows,
        out.stride(0),
        out.stride(1),
        H=num_heads,
        C=rank,
        SPLIT_BLOCK=split_block,
        MAX_SPLITS=most,
        SPLIT_CHUNK=min(most, SPLIT_CHUNK),
        COLUMNS=columns,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )
