"""Filter: rows that keep more ids than are held, by one read of the row for each bit of a key."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import KEEP_ALL, load_logits, ordered_logit, sort_key


@triton.jit
def weight_above(key, least, logits_ptr, row, row_max, scale, W, COUNT, C, BLOCK: tl.constexpr):
    """Sum weights (or count, if COUNT) of the row's ids whose key is at least both bounds."""
    total = tl.zeros((), tl.float64)
    for chunk in range(C):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr, row, ids, W)
        own = sort_key(x, ids)
        weight = tl.where(COUNT != 0, 1.0, tl.exp2((x - row_max) * scale))
        use = (own >= key) & (own >= least) & (ids < W)
        total += tl.sum(tl.where(use, weight, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def search_row(
    target, least, logits_ptr, row, row_max, scale, W, COUNT, C, BLOCK: tl.constexpr
):  # fmt: skip
    """Give the largest key, of those at or above `least`, from which on the weight reaches target.

    One read of the row for each of 64 bits: for rows that keep more ids than are held.
    """
    low, high = least, sort_key(row_max, tl.zeros((), tl.int32)) + 1
    for _ in range(64):
        if high - 1 > low:
            # Halves first: the sum of both may not fit.
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            got = weight_above(middle, least, logits_ptr, row, row_max, scale, W, COUNT, C, BLOCK)
            reaches = got >= target
            low = tl.where(reaches, middle, low)
            high = tl.where(reaches, high, middle)
    return low


@triton.jit
def cut_row(
    logits_ptr, row, mass, row_max, scale, edge, filters, W, C, BLOCK: tl.constexpr
):  # fmt: skip
    """Give cut and mass of a row, as `cut_held` does."""
    top_k, top_p, min_p = filters
    # The key of an id past all of the least logit's: what min-p keeps is above it.
    edge_key = sort_key(ordered_logit(edge), 0 * edge + W)
    cut = tl.where(min_p > 0, edge_key, KEEP_ALL)
    if min_p > 0:
        mass = weight_above(cut, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
    if (top_k > 0) & (top_k < W):
        count = top_k.to(tl.float64)
        cut = search_row(count, cut, logits_ptr, row, row_max, scale, W, 1, C, BLOCK)
        mass = weight_above(cut, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
    if top_p < 1:
        target = top_p * mass
        cut = search_row(target, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
        mass = weight_above(cut, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
    return cut, mass
