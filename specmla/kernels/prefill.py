"""Prompt attention: ragged multi-head attention over packed up-projected keys, with LSE.

One pass of online softmax, merged at its end with what the rows have seen so far if that is given.
Keys are read whole, or each head's own part and, apart from it, the rotated one that heads share.
Head widths need not be powers of two: a key width D is held as the largest power of two below it
and a masked rest (192 = 128 + 64), a value width as one masked block.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.head_widths import key_parts, value_pad
from specmla.kernels.launch import FP_FUSION, LaunchEntry
from specmla.kernels.prims import LOG2_E, MAX_FLOOR, shares, softmax_finish, softmax_step
from specmla.metadata import PrefillPart
from specmla.prompt_keys import PromptKeys

LEAST_SHARE = tl.constexpr(2.0**-30)

State = tuple[Tensor, Tensor]
"""Values [T, H, V] and LSE [T, H]."""


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


@triton.jit(
    do_not_specialize=["causal"],
    do_not_specialize_on_alignment=["lse_ptr", "prior_lse_ptr", "query_start_ptr", "kv_start_ptr"],
)
def prefill_kernel(
    out_ptr,
    lse_ptr,
    prior_ptr,  # [T, H, V] float32 or None; may be what out_ptr is
    prior_lse_ptr,  # [T, H] float32 or None; may be what lse_ptr is
    q_ptr,
    k_ptr,
    rope_ptr,  # [sum of S, D - D_MAIN], or None: behind k, of each head
    v_ptr,
    query_start_ptr,  # [B + 1] int32
    kv_start_ptr,  # [B + 1] int32
    scale_log2,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_prior_t,
    stride_prior_h,
    stride_prior_lse_t,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_rope_t,
    stride_v_t,
    stride_v_h,
    causal,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
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
    # One form for both: compiled apart, rows that see all keys took 5 to 9 % longer for each.
    least = num_keys + causal * (tile * BLOCK_M + 1 - num_rows)
    extent = least + causal * tl.arange(0, BLOCK_M)
    end = tl.minimum(num_keys, least + BLOCK_M - 1)
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
                if rope_ptr is None:
                    k_rest = head_part(k_at, held, D_MAIN, D_REST, D, masked)
                else:
                    rope_at = rope_ptr + s * stride_rope_t
                    k_rest = head_part(rope_at, held, 0, D_REST, D - D_MAIN, masked)
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
    inside = alive[:, None] & (columns < V)[None, :]
    out = acc
    if prior_ptr is not None:
        prior_lse_at = prior_lse_ptr + t * stride_prior_lse_t + h
        prior_lse = tl.load(prior_lse_at, mask=alive, other=float("-inf"))
        own, others, lse = shares(lse, prior_lse)
        # A float32 sum loses less. Nor is an empty state read: its values may be anything.
        counts = others > LEAST_SHARE
        prior_at = (prior_ptr + t * stride_prior_t + h * stride_prior_h)[:, None] + columns[None, :]
        prior = tl.load(prior_at, mask=inside & counts[:, None], other=0.0)
        others = tl.where(counts, others, 1.0)
        # A product with each state would take them through the layout of the scores.
        out, inverse = acc * (inverse * own / others)[:, None] + prior, others
        # In place, no warp may write what another one has yet to read.
        tl.debug_barrier()
    out = out * inverse[:, None]
    out_at = (out_ptr + t * stride_out_t + h * stride_out_h)[:, None] + columns[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + t * stride_lse_t + h, lse, mask=alive)


PREFILL = DirectKernel(prefill_kernel)


def prefill_attention(
    query: Tensor,
    keys: PromptKeys,
    part: PrefillPart,
    entry: LaunchEntry,
    *,
    softmax_scale: float,
    causal: bool,
    held: State | None = None,
    into: State | None = None,
) -> State:
    """Launch the prompt kernel.

    Args:
        query: [T, H, D], last stride 1.
        keys: of all requests, packed; `attendable`.
        part: row and key starts.
        entry: launch parameters.
        softmax_scale: natural scale of the scores.
        causal: bottom-right aligned if true, else every row sees all keys of its request.
        held: values and LSE over other keys, float32, to be merged with; last strides 1.
        into: where the result goes, `held` itself at will; None: new, in the query's dtype.

    Returns:
        Values [T, H, V] and LSE [T, H] float32 (natural log).
    """
    _, num_heads, width = query.shape
    key, rope, value = keys
    value_width = value.shape[2]
    out, lse = into if into is not None else _new_state(query, value_width)
    tiles = -(-max(part.query_lens, default=0) // entry.block_m)
    if tiles == 0:
        return out, lse
    main, rest = key_parts(width) if rope is None else (key.shape[2], value_pad(rope.shape[1]))
    prior, prior_lse = held if held is not None else (None, None)
    PREFILL.launch(
        (tiles, num_heads, len(part.query_lens)),
        out,
        lse,
        prior,
        prior_lse,
        query,
        key,
        rope,
        value,
        part.query_start,
        part.kv_start,
        softmax_scale * LOG2_E,
        *out.stride()[:2],
        lse.stride(0),
        *((0, 0) if prior is None else prior.stride()[:2]),
        0 if prior_lse is None else prior_lse.stride(0),
        *query.stride()[:2],
        *key.stride()[:2],
        0 if rope is None else rope.stride(0),
        *value.stride()[:2],
        int(causal),
        D=width,
        D_MAIN=main,
        D_REST=rest,
        V=value_width,
        V_PAD=value_pad(value_width),
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    return out, lse


def _new_state(query: Tensor, value_width: int) -> State:
    rows, heads, _ = query.shape
    lse = query.new_empty(rows, heads, dtype=torch.float32)
    return query.new_empty(rows, heads, value_width), lse
