"""Device helpers of fused acceptance: weights, order of logits, and what is decided about a block.

A row of logits is cut into chunks of BLOCK ids. Ids are ordered by falling logit, lowest id first
among equals, through one int64 key; what top-k, top-p, min-p and temperature 0 keep of a row is all
ids whose key is at least the row's cut.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.splitmix import ACCEPT, uniform

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_TEMPERATURE = tl.constexpr(1.0e-30)
"""Colder is the same: logits that differ then differ by more than float32 can raise to a power."""

KEEP_ALL = tl.constexpr(-(2**63))
"""Cut of a row that keeps every id."""

TOKEN_LEVEL = tl.constexpr(0)
BLOCK_RULE = tl.constexpr(1)
MATCH = tl.constexpr(2)


@triton.jit
def exponent_scale(temperature):
    """Factor from logits to base-2 exponents; 1 nat a logit at temperature 0."""
    soft = tl.where(temperature > 0, tl.maximum(temperature, LEAST_TEMPERATURE), 1.0)
    return LOG2_E / soft


@triton.jit
def load_logits(logits_ptr, row, ids, W):
    """Load logits of one row in float32, -inf outside the vocabulary."""
    return tl.load(logits_ptr + row * W + ids, mask=ids < W, other=float("-inf")).to(tl.float32)


@triton.jit
def order_bits(x):
    """Give int32 numbers that rise with the logit; -0 equals 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ordered_logit(ordered):
    """Give the logit of such a number."""
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sort_key(x, ids):
    """Give int64 keys that rise with the logit and, among equals, fall with the id."""
    return (order_bits(x).to(tl.int64) << 32) | (4294967295 - ids.to(tl.int64))


@triton.jit
def key_id(key):
    """Give the id of a key."""
    return (4294967295 - (key & 4294967295)).to(tl.int32)


@triton.jit
def weigh(x, ids, row_max, scale, cut, FILTER: tl.constexpr):
    """Give exp of logits less the maximum, over the temperature; 0 for ids below the cut."""
    w = tl.exp2((x - row_max) * scale)
    if FILTER:
        w = tl.where(sort_key(x, ids) >= cut, w, 0.0)
    return w


@triton.jit
def drawn_from(
    ids, x, row_max, mass, scale, cut, part, b, j, draft, is_residual, q_ptr, K, W,
    FILTER: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Give what a token is drawn from, for ids [N] of row j: part * p, less q where it is residual.

    part is P_j of block verification, else 1. draft: the id that one-hot q is at.
    """
    p = part * (weigh(x, ids, row_max, scale, cut, FILTER) / mass)
    if DENSE:
        at = q_ptr + (b * K + j).to(tl.int64) * W + ids
        q = tl.load(at, mask=ids < tl.where(is_residual, W, 0), other=0.0)
        rest = p - q
        return tl.where(rest < 0, 0.0, rest)  # NaN of q stays, and flags the row
    return tl.where(ids == tl.where(is_residual, draft, -1), 0.0, p)


@triton.jit
def whole_weight(weight):
    """Give weights as integers of 61 bits: they sum to 1 at most, but for rounding."""
    return (weight * 2305843009213693952.0).to(tl.int64)


@triton.jit
def whole_target(fraction, total):
    """Give the integer up to which sums of `whole_weight` are passed over, at a fraction of all."""
    return tl.minimum((fraction * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def pick(weight, fraction):
    """Give the index into `weight` [N] at a fraction of its sum, by sums of integers."""
    whole = whole_weight(weight)
    target = whole_target(fraction, tl.sum(whole, 0))
    return tl.sum((tl.cumsum(whole, 0) <= target).to(tl.int32), 0)


@triton.jit
def draft_ratios(
    b, j, logits_ptr, table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale, K, W,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Give p(d) / q(d) of drafts j [N] of request b, the drafts, and how many are before a gap."""
    inside = (j >= 0) & (j < K)
    draft = tl.load(drafts_ptr + b * K + j, mask=inside, other=-1)
    known = inside & (draft >= 0) & (draft < W)
    at = tl.where(known, draft, 0)
    place = b * (K + 1) + j
    row = tl.load(table_ptr + place, mask=inside, other=0)
    x = tl.load(logits_ptr + row * W + at, mask=known, other=float("-inf")).to(tl.float32)
    row_max = tl.load(max_ptr + place, mask=inside, other=0.0)
    mass = tl.load(mass_ptr + place, mask=inside, other=1.0)
    cut = tl.load(cut_ptr + place, mask=inside, other=0)
    ratio = weigh(x, at, row_max, scale, cut, True) / mass
    if DENSE:
        q = tl.load(q_ptr + (b * K + j).to(tl.int64) * W + at, mask=known, other=1.0)
        ratio = tl.where(q > 0, ratio / tl.where(q > 0, q, 1.0), 0.0)
    count = tl.min(tl.where((j < 0) | (inside & (draft >= 0)), 1 << 30, j))
    return tl.where(known, ratio, 0.0), draft, count


@triton.jit
def _then(product, least, next_product, next_least):
    """Compose P -> min(least, product * P) with the next one; products are kept finite."""
    return (
        tl.minimum(product * next_product, 1.0e30),
        tl.minimum(next_least, tl.minimum(least * next_product, 1.0e30)),
    )


@triton.jit
def reach(ratio):
    """Give P_1 .. P_n [n] of the ratios of drafts 1 .. n: P_i = min(1, P_{i-1} ratio_i)."""
    r = tl.minimum(ratio, 1.0e30)
    product, least = tl.associative_scan((r, tl.minimum(r, 1.0)), 0, _then)
    return tl.minimum(least, product)


@triton.jit
def first_refusal(ratio, j, count, seed, position):
    """Give how many drafts lead with u < ratio."""
    u = uniform(seed, position, j, ACCEPT)
    stands = (j < count) & (u < ratio.to(tl.float64))
    return tl.min(tl.where(stands, 1 << 30, j))


@triton.jit
def last_pass(before, rest, j, count, seed, position):
    """Give the longest prefix whose test passes.

    Args:
        before: [N] P_j, of the prefix of j drafts.
        rest: [N] S_j, the mass of max(P_j p - q, 0) at the place after it.
        j: [N] 0, 1, 2 ...; count: drafts of the request. seed, position: of its numbers.
    """
    both = rest + 1.0 - before
    inner = tl.where(both > 0, rest / tl.where(both > 0, both, 1.0), 1.0)
    chance = tl.where(j < count, inner, before)
    u = uniform(seed, position, tl.maximum(j - 1, 0), ACCEPT)
    passes = (j > 0) & (j <= count) & (before > 0) & (u < chance.to(tl.float64))
    return tl.max(tl.where(passes, j, 0))
