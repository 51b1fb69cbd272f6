"""Device helpers that several kernels share: page addresses, masks, the softmax step.

Scores are kept in base 2 (the scale carries log2 e), running maxima start at a finite floor so that
a row without keys never computes `inf - inf`, and everything leaves a kernel in natural log.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels of this process are interpreted (TRITON_INTERPRET=1 at import)."""

LOG2_E = 1.4426950408889634
"""Factor from natural to base-2 exponents; the host folds it into the softmax scale."""

MAX_FLOOR = tl.constexpr(-1.0e30)
"""Start of a running maximum: below every score, yet finite."""

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_rows(index, first_row, num_rows, H: tl.constexpr):
    """Of packed rows `index` [M]: whether the request has them, their row t of T, their head."""
    return index < num_rows * H, (first_row + index // H).to(tl.int64), (index % H).to(tl.int64)


@triton.jit
def block_pages(table_ptr, start, num_keys, G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of keys `start .. start + BLOCK_N`, 0 for keys past `num_keys`.

    Table cells past the last page are never read: they may hold any id. Where a page holds whole
    blocks one scalar id serves all rows (`start` is a multiple of BLOCK_N), else one id a row.
    Kernels fetch the ids of the next block while they work on this one: an address that waits for
    its page id in the same iteration would stall the whole loop.
    """
    keys = start if G % BLOCK_N == 0 else start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + keys // G, mask=keys < num_keys, other=0)


@triton.jit
def block_rows(
    cache_ptr, pages, start, page_stride, A: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers [BLOCK_N] to the cache rows of a block whose page ids are `pages`."""
    lane = tl.arange(0, BLOCK_N)
    row = start % G + lane if G % BLOCK_N == 0 else (start + lane) % G
    return cache_ptr + pages.to(tl.int64) * page_stride + row * A


@triton.jit
def visible_keys(keys, prefix, first_key, extent, word, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """Which of `keys` [N] each row sees, [M, N]: its extent, window and word of draft bits.

    Bits concern the new rows only, keys `prefix + j`; they are read one by one, in any order.
    """
    seen = keys[None, :] < extent[:, None]
    if WINDOW:
        seen = seen & (keys[None, :] >= first_key[:, None])
    if TREE:
        node = tl.minimum(tl.maximum(keys - prefix, 0), 63).to(tl.int64)
        bit = (word[:, None] >> node[None, :]) & 1
        seen = seen & ((keys < prefix)[None, :] | (bit != 0))
    return seen


@triton.jit
def softmax_step(scores, row_max, row_sum):
    """Fold base-2 `scores` [M, N] into the running maximum and sum of each row.

    Returns the weights [M, N], the factor by which what was accumulated shrinks, maximum and sum.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shrink = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - new_max[:, None])
    return weights, shrink, new_max, row_sum * shrink + tl.sum(weights, axis=1)


@triton.jit
def softmax_finish(row_max, row_sum):
    """Reciprocal of each row's sum and its natural-log LSE; an empty row gives 0 and -inf."""
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    lse = (row_max + tl.log2(total)) * LN_2
    return tl.where(empty, 0.0, 1.0 / total), tl.where(empty, float("-inf"), lse)


@triton.jit
def shares(lse, prior):
    """Give the shares of two states by their natural LSEs, and the LSE of both.

    An empty state has no share and leaves the other one's LSE as it is, to the bit.
    """
    top = tl.maximum(lse, prior)
    top = tl.where(top == float("-inf"), 0.0, top)
    own, others = tl.exp2((lse - top) / LN_2), tl.exp2((prior - top) / LN_2)
    both = own + others
    whole = tl.where(both > 0, both, 1.0)
    merged = tl.where(both > 0, top + tl.log2(whole) * LN_2, float("-inf"))
    return own / whole, others / whole, merged
