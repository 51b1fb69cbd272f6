"""Row-expanded attention: every query row is its own single-token request.

The portable form and a cross-check of the packed one: a program holds heads of one row and streams
one piece of the keys that this row sees, so a request's cache is read once per row.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.combine import combine
from specmla.kernels.direct import DirectKernel
from specmla.kernels.launch import FP_FUSION
from specmla.kernels.pieces import FIELDS
from specmla.kernels.plan import PiecePlan
from specmla.kernels.prims import (
    LOG2_E,
    MAX_FLOOR,
    block_pages,
    block_rows,
    softmax_finish,
    softmax_step,
)
from specmla.query import RowTables


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_table_ptr", "row_start_ptr"],
)
def rows_kernel(
    out_ptr,  # [T, H, C], of tiles that were not cut
    lse_ptr,  # [T, H] float32, contiguous
    partial_ptr,  # [slots, BLOCK_H, C] float32, of those that were
    partial_lse_ptr,  # [slots, BLOCK_H] float32
    piece_ptr,  # [programs, FIELDS] int32
    q_latent_ptr,
    q_rope_ptr,
    cache_ptr,
    block_table_ptr,  # [T, M] int32
    row_start_ptr,  # [T] int32 or None
    scale_log2,
    stride_table,
    stride_latent_t,
    stride_latent_h,
    stride_rope_t,
    stride_rope_h,
    stride_page,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend BLOCK_H heads of one row over one piece of its keys."""
    record = piece_ptr + tl.program_id(0) * FIELDS
    row = tl.load(record)
    if row < 0:
        return
    tile, run = tl.load(record + 1), tl.load(record + 3) * BLOCK_N
    # A product, so that the compiler knows that keys start at multiples of BLOCK_N.
    begin = tl.load(record + 2) * run
    slot, num_keys = tl.load(record + 4), tl.load(record + 7)
    end = tl.minimum(begin + run, num_keys)
    first_key = 0
    if row_start_ptr is not None:
        first_key = tl.load(row_start_ptr + row)
        begin = tl.maximum(begin, tl.maximum(first_key, 0) // BLOCK_N * BLOCK_N)

    t = row.to(tl.int64)
    lanes = tl.arange(0, BLOCK_H)
    h = tile * BLOCK_H + lanes
    alive = h < H
    offs_c = tl.arange(0, C)
    latent_at = q_latent_ptr + t * stride_latent_t + h.to(tl.int64) * stride_latent_h
    q_latent = tl.load(latent_at[:, None] + offs_c[None, :], mask=alive[:, None], other=0.0)
    if R > 0:
        offs_r = tl.arange(0, R)
        rope_at = q_rope_ptr + t * stride_rope_t + h.to(tl.int64) * stride_rope_h
        q_rope = tl.load(rope_at[:, None] + offs_r[None, :], mask=alive[:, None], other=0.0)

    table_ptr = block_table_ptr + t * stride_table
    row_max = tl.full([BLOCK_H], MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, C], tl.float32)
    pages = block_pages(table_ptr, begin, num_keys, G, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        held = keys < num_keys
        # Stale rows are read as zeros: a weight of zero would not do, 0 * NaN is NaN.
        row_at = block_rows(cache_ptr, pages, start, stride_page, C + R, G, BLOCK_N)[:, None]
        kv = tl.load(row_at + offs_c[None, :], mask=held[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(kv), input_precision="ieee")
        if R > 0:
            k_rope = tl.load(row_at + C + offs_r[None, :], mask=held[:, None], other=0.0)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        pages = block_pages(table_ptr, start + BLOCK_N, num_keys, G, BLOCK_N)
        seen = (held & (keys >= first_key))[None, :]
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        weights, shrink, row_max, row_sum = softmax_step(scores, row_max, row_sum)
        acc = tl.dot(weights.to(kv.dtype), kv, acc * shrink[:, None], input_precision="ieee")

    inverse, lse = softmax_finish(row_max, row_sum)
    out = acc * inverse[:, None]
    if slot < 0:
        at = t * H + h
        out_at = (out_ptr + at * C)[:, None] + offs_c[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=alive[:, None])
        tl.store(lse_ptr + at, lse, mask=alive)
    else:
        at = slot.to(tl.int64) * BLOCK_H + lanes
        partial_at = (partial_ptr + at * C)[:, None] + offs_c[None, :]
        tl.store(partial_at, out, mask=alive[:, None])
        tl.store(partial_lse_ptr + at, lse, mask=alive)


ROWS = DirectKernel(rows_kernel)


def rows_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    rows: RowTables,
    row_start: Tensor | None,
    plan: PiecePlan,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the row kernel, and the merge where the plan may cut.

    Args:
        q_latent: [T, H, C]. q_rope: [T, H, R]. latent_cache: [N, G, C + R]. All of one dtype; last
            strides 1, cache rows contiguous within a page (checked by the backend).
        rows: keys that each row sees [T] and its pages [T, M].
        row_start: [T] int32, first key that each row sees, or None.
        plan: of the step, every row a request.
        softmax_scale: natural scale of the scores.

    Returns:
        Latents [T, H, C] in the query's dtype and LSE [T, H] float32 (natural log).
    """
    num_rows, num_heads, rank = q_latent.shape
    out = q_latent.new_empty(num_rows, num_heads, rank)
    lse = q_latent.new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows == 0:
        return out, lse
    entry = plan.entry
    ROWS.launch(
        (plan.bounds.programs,),
        out,
        lse,
        plan.partial_out,
        plan.partial_lse,
        plan.pieces,
        q_latent,
        q_rope,
        latent_cache,
        rows.block_table,
        row_start,
        softmax_scale * LOG2_E,
        rows.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        latent_cache.stride(0),
        H=num_heads,
        C=rank,
        R=q_rope.shape[2],
        G=latent_cache.shape[1],
        BLOCK_H=entry.block_m,
        BLOCK_N=entry.block_n,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    combine(out, lse, plan)
    return out, lse
