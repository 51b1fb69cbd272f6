"""Prompt attention: ragged multi-head attention over packed up-projected keys, with LSE.

One pass of online softmax. Head widths need not be powers of two: a key width D is held as the
largest power of two below it and a masked rest (192 = 128 + 64), a value width as one masked block.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.launch import FP_FUSION, LaunchEntry, describe_device, find_entry
from specmla.kernels.prims import LOG2_E, MAX_FLOOR, softmax_finish, softmax_step
from specmla.metadata import PrefillPart

MIN_DOT = 16
"""Least width that a dot takes."""


@triton.jit
def head_part(
    at, row_mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):
    """Load columns `FIRST .. FIRST + WIDTH` of rows `at` [N], zeros past D and `row_mask`."""
    columns = FIRST + tl.arange(0, WIDTH)
    where = at[:, None] + columns[None, :]
    if FIRST + WIDTH > D:
        inside = (columns < D)[None, :]
        return tl.load(where, mask=row_mask[:, None] & inside if MASKED else inside, other=0.0)
    elif MASKED:
        return tl.load(where, mask=row_mask[:, None], other=0.0)
    else:
        return tl.load(where)


@triton.jit(do_not_specialize_on_alignment=["query_start_ptr", "kv_start_ptr"])
def prefill_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_ptr,  # [B + 1] int32
    kv_start_ptr,  # [B + 1] int32
    scale_log2,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend BLOCK_M rows of one head of one request; causal is aligned bottom right."""
    head, request = tl.program_id(1), tl.program_id(2)
    # Later tiles see more keys: they start first, so that none of them is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = tl.load(query_start_ptr + request)
    num_rows = tl.load(query_start_ptr + request + 1) - first_row
    if tile * BLOCK_M >= num_rows:
        return
    first_key = tl.load(kv_start_ptr + request)
    num_keys = tl.load(kv_start_ptr + request + 1) - first_key
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = i < num_rows
    end = num_keys
    plain_end = num_keys // BLOCK_N * BLOCK_N
    extent = num_keys + i * 0
    if CAUSAL:
        extent = num_keys - num_rows + 1 + i
        least = num_keys - num_rows + 1 + tile * BLOCK_M
        end = tl.minimum(end, least + BLOCK_M - 1)
        plain_end = tl.minimum(tl.maximum(least, 0), num_keys) // BLOCK_N * BLOCK_N

    t = (first_row + i).to(tl.int64)
    h = head.to(tl.int64)
    q_at = q_ptr + t * stride_q_t + h * stride_q_h
    q = head_part(q_at, alive, 0, D_MAIN, D, True)
    if D_REST > 0:
        q_rest = head_part(q_at, alive, D_MAIN, D_REST, D, True)
    row_max = tl.full([BLOCK_M], MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    for masked in tl.static_range(2):
        lo = plain_end if masked else 0
        hi = end if masked else plain_end
        for start in range(lo, hi, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            held = key < num_keys
            s = (first_key + key).to(tl.int64)
            k_at = k_ptr + s * stride_k_t + h * stride_k_h
            k = head_part(k_at, held, 0, D_MAIN, D, masked)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if D_REST > 0:
                k_rest = head_part(k_at, held, D_MAIN, D_REST, D, masked)
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
            scores = scores * scale_log2
            if masked:
                seen = held[None, :] & (key[None, :] < extent[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            weights, shrink, row_max, row_sum = softmax_step(scores, row_max, row_sum)
            v = head_part(v_ptr + s * stride_v_t + h * stride_v_h, held, 0, V_PAD, V, masked)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    inverse, lse = softmax_finish(row_max, row_sum)
    columns = tl.arange(0, V_PAD)
    out_at = (out_ptr + t * stride_out_t + h * stride_out_h)[:, None] + columns[None, :]
    out = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=alive[:, None] & (columns < V)[None, :])
    tl.store(lse_ptr + t * stride_lse_t + h, lse, mask=alive)


PREFILL = DirectKernel(prefill_kernel)


def key_parts(width: int) -> tuple[int, int]:
    """Cut a key width into a power of two and a rest (padded to one), both fit for a dot."""
    main = max(MIN_DOT, 1 << (width.bit_length() - 1))
    rest = width - main
    return main, 0 if rest <= 0 else max(MIN_DOT, 1 << (rest - 1).bit_length())


def value_pad(width: int) -> int:
    """Pad a value width to a power of two fit for a dot."""
    return max(MIN_DOT, 1 << (width - 1).bit_length())


def find_prefill_entry(query: Tensor, value: Tensor, kernel: str = "prefill") -> LaunchEntry:
    """Give the launch entry for the widths of `query` [T, H, D] and `value` [sum of S, H, V].

    The table's buckets of `kernel` ("prefill" or "fold") are widths (the larger of the two), not
    row counts.
    """
    width = max(query.shape[2], value.shape[2])
    return find_entry(kernel, describe_device(query.device).arch, width, query.element_size())


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: PrefillPart,
    entry: LaunchEntry,
    *,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the prompt kernel.

    Args:
        query: [T, H, D]. key: [sum of S, H, D]. value: [sum of S, H, V]. Last strides 1.
        part: row and key starts.
        entry: launch parameters.
        softmax_scale: natural scale of the scores.
        causal: bottom-right aligned if true, else every row sees all keys of its request.

    Returns:
        Values [T, H, V] in the query's dtype and LSE [T, H] float32 (natural log).
    """
    num_rows, num_heads, width = query.shape
    value_width = value.shape[2]
    out = query.new_empty(num_rows, num_heads, value_width)
    lse = query.new_empty(num_rows, num_heads, dtype=torch.float32)
    tiles = -(-max(part.query_lens, default=0) // entry.block_m)
    if tiles == 0:
        return out, lse
    main, rest = key_parts(width)
    PREFILL.launch(
        (tiles, num_heads, len(part.query_lens)),
        out,
        lse,
        query,
        key,
        value,
        part.query_start,
        part.kv_start,
        softmax_scale * LOG2_E,
        *out.stride()[:2],
        lse.stride(0),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        D=width,
        D_MAIN=main,
        D_REST=rest,
        V=value_width,
        V_PAD=value_pad(value_width),
        CAUSAL=causal,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    return out, lse
