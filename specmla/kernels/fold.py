"""Prompt attention key block by key block into a state that stays: whatever is cut, equal bits.

The running maximum, sum and weighted values of each row are read, carried on over the keys that are
given, and written back in float32. Blocks of keys begin at multiples of BLOCK_N from the first key
given, so keys given in parts that begin at such multiples are added in the same order as all at
once. One form of a step, masked or not, serves every row.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.head_widths import key_parts, value_pad
from specmla.kernels.launch import FP_FUSION, LaunchEntry
from specmla.kernels.prefill import head_part
from specmla.kernels.prims import LOG2_E, softmax_step
from specmla.metadata import PrefillPart


@triton.jit(
    do_not_specialize_on_alignment=["query_start_ptr", "kv_start_ptr", "first_extent_ptr"],
)
def fold_kernel(
    acc_ptr,  # [T, H, V] float32, contiguous
    max_ptr,  # [T, H] float32, contiguous, base 2
    sum_ptr,  # the same
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_ptr,  # [B + 1] int32
    kv_start_ptr,  # [B + 1] int32
    first_extent_ptr,  # [B] int32, keys that the first row of a request sees; a row sees one more
    scale_log2,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    H: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Carry BLOCK_M rows of one head of one request over the keys of that request."""
    head, request = tl.program_id(1), tl.program_id(2)
    # Later tiles see more keys: they start first, so that none of them is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = tl.load(query_start_ptr + request)
    num_rows = tl.load(query_start_ptr + request + 1) - first_row
    first_key = tl.load(kv_start_ptr + request)
    num_keys = tl.load(kv_start_ptr + request + 1) - first_key
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = i < num_rows
    extent = tl.load(first_extent_ptr + request) + i
    end = tl.minimum(num_keys, tl.max(tl.where(alive, extent, 0)))
    if end <= 0:
        return

    t, h = (first_row + i).to(tl.int64), head.to(tl.int64)
    q_at = q_ptr + t * stride_q_t + h * stride_q_h
    q = head_part(q_at, alive, 0, D_MAIN, D, True)
    if D_REST > 0:
        q_rest = head_part(q_at, alive, D_MAIN, D_REST, D, True)
    row_at = t * H + h
    columns = tl.arange(0, V_PAD)
    acc_at = (acc_ptr + row_at * V)[:, None] + columns[None, :]
    kept = alive[:, None] & (columns < V)[None, :]
    row_max = tl.load(max_ptr + row_at, mask=alive, other=0.0)
    row_sum = tl.load(sum_ptr + row_at, mask=alive, other=0.0)
    acc = tl.load(acc_at, mask=kept, other=0.0)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = key < num_keys
        s = (first_key + key).to(tl.int64)
        k_at = k_ptr + s * stride_k_t + h * stride_k_h
        k = head_part(k_at, held, 0, D_MAIN, D, True)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if D_REST > 0:
            k_rest = head_part(k_at, held, D_MAIN, D_REST, D, True)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        seen = held[None, :] & (key[None, :] < extent[:, None])
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        weights, shrink, row_max, row_sum = softmax_step(scores, row_max, row_sum)
        v = head_part(v_ptr + s * stride_v_t + h * stride_v_h, held, 0, V_PAD, V, True)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    tl.store(max_ptr + row_at, row_max, mask=alive)
    tl.store(sum_ptr + row_at, row_sum, mask=alive)
    tl.store(acc_at, acc, mask=kept)


FOLD = DirectKernel(fold_kernel)


def fold_keys(
    state: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: PrefillPart,
    entry: LaunchEntry,
    *,
    softmax_scale: float,
) -> None:
    """Carry the state of query rows on over the keys of `part`, in place.

    Args:
        state: weighted values [T, H, V], base-2 maxima and sums [T, H], float32 contiguous.
        query: [T, H, D]. key: [sum of S, H, D]. value: [sum of S, H, V]. Last strides 1.
        part: row and key starts, and `first_extent`.
        entry: launch parameters of the prompt kernel.
        softmax_scale: natural scale of the scores.
    """
    tiles = -(-max(part.query_lens, default=0) // entry.block_m)
    if tiles == 0:
        return
    acc, row_max, row_sum = state
    _, num_heads, width = query.shape
    main, rest = key_parts(width)
    FOLD.launch(
        (tiles, num_heads, len(part.query_lens)),
        acc,
        row_max,
        row_sum,
        query.detach(),
        key.detach(),
        value.detach(),
        part.query_start,
        part.kv_start,
        part.first_extent,
        softmax_scale * LOG2_E,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        H=num_heads,
        D=width,
        D_MAIN=main,
        D_REST=rest,
        V=value.shape[2],
        V_PAD=value_pad(value.shape[2]),
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
