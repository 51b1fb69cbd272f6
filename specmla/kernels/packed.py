"""Packed verify attention: all rows of a request share tiles, one launch serves ragged Q.

Row `t * H + h` of a request is head h of its new row t. A program holds BLOCK_M of them and streams
one piece of the request's cache, as its record in the plan says; each cache row is loaded once and
used as key (all C + R columns) and as value (its first C). Programs of one piece and neighbouring
tiles follow one another, so that they stream the same pages through L2.
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
from specmla.kernels.fp8_rows import Fp8Rows
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
    tile_rows,
    visible_keys,
)
from specmla.kernels.row_loads import PLAIN, load_latent, load_rope
from specmla.metadata import VerifyPart


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "row_extent_ptr",
        "row_start_ptr",
        "tree_bits_ptr",
    ],
)
def packed_kernel(
    out_ptr,  # [T, H, C], of tiles that were not cut
    lse_ptr,  # [T, H] float32, contiguous
    partial_ptr,  # [slots, BLOCK_M, C] float32, of those that were
    partial_lse_ptr,  # [slots, BLOCK_M] float32
    piece_ptr,  # [programs, FIELDS] int32
    q_latent_ptr,
    q_rope_ptr,
    cache_ptr,
    block_table_ptr,  # [B, M] int32
    row_extent_ptr,  # [T] int32
    row_start_ptr,  # [T] int32 or None
    tree_bits_ptr,  # [T] int64 or None
    scale_log2,
    row_scale,  # of all rows where the cache has one that is not 1, or None
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
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """Attend one tile of rows over one piece; writes normalised output and LSE of that piece."""
    WINDOW: tl.constexpr = row_start_ptr is not None
    TREE: tl.constexpr = tree_bits_ptr is not None
    record = piece_ptr + tl.program_id(0) * FIELDS
    request = tl.load(record)
    if request < 0:
        return
    tile, run = tl.load(record + 1), tl.load(record + 3) * BLOCK_N
    # A product, so that the compiler knows that keys start at multiples of BLOCK_N.
    begin = tl.load(record + 2) * run
    first_row, num_rows, num_keys = tl.load(record + 5), tl.load(record + 6), tl.load(record + 7)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    alive, t, h = tile_rows(rows, first_row, num_rows, H)
    extent = tl.minimum(tl.load(row_extent_ptr + t, mask=alive, other=0), num_keys)
    end = tl.minimum(begin + run, tl.max(extent, axis=0))
    # Blocks up to here are seen whole by every row of the tile.
    plain_end = tl.min(tl.where(alive, extent, num_keys), axis=0)
    prefix = num_keys - num_rows
    first_key, word = extent, t
    if TREE:
        word = tl.load(tree_bits_ptr + t, mask=alive, other=0)
        plain_end = tl.minimum(plain_end, prefix)
    if WINDOW:
        first_key = tl.load(row_start_ptr + t, mask=alive, other=0)
        least = tl.min(tl.where(alive, first_key, num_keys), axis=0)
        begin = tl.maximum(begin, tl.maximum(least, 0) // BLOCK_N * BLOCK_N)
        plain_end = 0

    offs_c = tl.arange(0, C)
    latent_at = q_latent_ptr + t * stride_latent_t + h * stride_latent_h
    q_latent = tl.load(latent_at[:, None] + offs_c[None, :], mask=alive[:, None], other=0.0)
    if R > 0:
        offs_r = tl.arange(0, R)
        rope_at = q_rope_ptr + t * stride_rope_t + h * stride_rope_h
        q_rope = tl.load(rope_at[:, None] + offs_r[None, :], mask=alive[:, None], other=0.0)

    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    row_max = tl.full([BLOCK_M], MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, C], tl.float32)
    pages = block_pages(table_ptr, begin, num_keys, G, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        held = (keys < num_keys)[:, None]
        # Stale rows are read as zeros: a weight of zero would not do, 0 * NaN is NaN.
        row_at = block_rows(cache_ptr, pages, start, stride_page, ROW, G, BLOCK_N)[:, None]
        kv = load_latent(row_at, offs_c[None, :], held, q_latent.dtype, GROUP, SCALES)
        if R > 0:
            k_rope = load_rope(
                row_at, offs_r[None, :], held, q_latent.dtype, C, GROUP, SCALES, ROPE
            )
        pages = block_pages(table_ptr, start + BLOCK_N, num_keys, G, BLOCK_N)

        # See NOTES.md, "Branches that are always taken", for why BRANCHED wraps the step.
        if start < end if BRANCHED else True:
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            weights = tl.full([BLOCK_M, BLOCK_N], scale_log2, tl.float32).to(kv.dtype)
            shrink = tl.full([BLOCK_M], scale_log2, tl.float32)
            if start < num_keys if BRANCHED else True:
                scores = tl.dot(q_latent, tl.trans(kv), input_precision="ieee")
            if start >= begin if BRANCHED else True:
                if start + BLOCK_N <= plain_end:
                    if R > 0:
                        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
                    scores = scores * scale_log2
                else:
                    if R > 0:
                        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
                    seen = visible_keys(keys, prefix, first_key, extent, word, WINDOW, TREE)
                    scores = tl.where(seen, scores * scale_log2, float("-inf"))
                scores, shrink, row_max, row_sum = softmax_step(scores, row_max, row_sum)
                weights = scores.to(kv.dtype)
            acc = tl.dot(weights, kv, acc * shrink[:, None], input_precision="ieee")

    inverse, lse = softmax_finish(row_max, row_sum)
    # Read again, so that no row is kept in registers through the loop, which has none to spare.
    slot, tile = tl.load(record + 4, volatile=True), tl.load(record + 1, volatile=True)
    first_row, num_rows = tl.load(record + 5, volatile=True), tl.load(record + 6, volatile=True)
    lanes = tl.arange(0, BLOCK_M)
    alive = lanes < num_rows * H - tile * BLOCK_M
    out = acc * inverse[:, None]
    if row_scale is not None:
        out = out * row_scale
    if slot < 0:
        row = (first_row * H + tile * BLOCK_M).to(tl.int64) + lanes
        out_at = (out_ptr + row * C)[:, None] + offs_c[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=alive[:, None])
        tl.store(lse_ptr + row, lse, mask=alive)
    else:
        row = slot.to(tl.int64) * BLOCK_M + lanes
        partial_at = (partial_ptr + row * C)[:, None] + offs_c[None, :]
        tl.store(partial_at, out, mask=alive[:, None])
        tl.store(partial_lse_ptr + row, lse, mask=alive)


PACKED = DirectKernel(packed_kernel)


def packed_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    plan: PiecePlan,
    softmax_scale: float,
    form: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the packed kernel, and the merge where the plan may cut.

    Args:
        q_latent: [T, H, C]. q_rope: [T, H, R]. latent_cache: [N, G, C + R]. All of one dtype; last
            strides 1, cache rows contiguous within a page (checked by the backend).
        part: the step's verify rows.
        plan: of the step.
        softmax_scale: natural scale of the scores.
        form: where codes and scales lie if the cache is [N, G, bytes] uint8; None for numbers. A
            scale of all rows is applied to scores and output, the products take bare codes.

    Returns:
        Latents [T, H, C] in the query's dtype and LSE [T, H] float32 (natural log).
    """
    num_rows, num_heads, rank = q_latent.shape
    out = q_latent.new_empty(num_rows, num_heads, rank)
    lse = q_latent.new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows == 0:
        return out, lse
    entry = plan.entry
    PACKED.launch(
        (plan.bounds.programs,),
        out,
        lse,
        plan.partial_out,
        plan.partial_lse,
        plan.pieces,
        q_latent,
        q_rope,
        latent_cache,
        part.block_table,
        part.row_extent,
        part.row_start,
        part.tree_bits,
        softmax_scale * LOG2_E * (form.scale if form else 1.0),
        form.scale if form and form.scale != 1.0 else None,
        part.block_table.stride(0),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        latent_cache.stride(0),
        H=num_heads,
        C=rank,
        R=q_rope.shape[2],
        G=latent_cache.shape[1],
        ROW=latent_cache.shape[2],
        GROUP=form.group if form else PLAIN,
        SCALES=form.scales_at * 4 if form else 0,
        ROPE=form.rope_at * 2 if form else 0,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        STAGES=entry.num_stages,
        BRANCHED=entry.branched,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    combine(out, lse, plan)
    return out, lse
