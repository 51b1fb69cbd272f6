"""Filter: which groups of ids can hold an id that is kept, judged by what the first pass left.

A chunk is cut into groups of GROUP ids; the first pass keeps the maximum of each and its weight.
Where k groups have a maximum of at least t, k ids do: the largest such t bounds the k-th id from
below, and only the few groups that reach it are ever read again. For top-p a group that reaches t
has at least the weight of its maximum, and at least its own less what the others can weigh below t.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import order_bits, ordered_logit

GROUP = 32
"""Ids of a group, but no more than a chunk has."""

LOWEST = tl.constexpr(-(2**31) + 2**23)
"""`order_bits` of the least finite number: what is -inf is never kept."""

FAR_BELOW = tl.constexpr(24.0)
"""Base-2 exponents below the maximum: all that lies there rarely weighs as much as one id."""

SLACK = tl.constexpr(0.999)
"""Of the mass that top-p may leave out, the part used: float32 sums round by far less."""

NEAR = tl.constexpr(0.001)
"""Of the mass that top-p asks for, by how much more is near enough."""

GUESS = tl.constexpr(0.1)
"""See `least_by_mass`: of rows whose guess falls short the ids are held again, without one."""


@triton.jit
def is_searched(top_k, top_p, W):
    """Whether a request keeps the top ids only, by number or mass."""
    return ((top_k > 0) & (top_k < W)) | (top_p < 1)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, W):
    """Whether a request that is not greedy may leave ids out."""
    return (temperature > 0) & (is_searched(top_k, top_p, W) | (min_p > 0))


@triton.jit
def load_tops(at, GROUPS: tl.constexpr):
    """Load `order_bits` of the maxima of a row's groups [GROUPS]; at: pointer to them, number."""
    group = tl.arange(0, GROUPS)
    return order_bits(tl.load(at[0] + group, mask=group < at[1], other=float("-inf")))


@triton.jit
def middle_of(low, high):
    """Give the number half-way: halves first, for the sum of both may not fit."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def search_range(row_max, scale, FINE: tl.constexpr):
    """Give bounds of a search for a logit, and what is tried first: far below there is little."""
    high = (order_bits(row_max) >> FINE) + 1
    low = 0 * high + (LOWEST >> FINE)
    first = order_bits(row_max - FAR_BELOW / scale) >> FINE
    return low, high, tl.minimum(tl.maximum(first, low + 1), high - 1)


@triton.jit
def least_by_number(top, row_max, scale, top_k, FINE: tl.constexpr):
    """Give the largest found t, as `order_bits`, that top_k maxima [G] reach.

    FINE: low bits of `order_bits` in which no two logits of the row differ.
    """
    top = top >> FINE
    low, high, first = search_range(row_max, scale, FINE)
    for n in range(32):
        if high > low + 1:
            middle = tl.where(n == 0, first, middle_of(low, high))
            number = tl.sum((top >= middle).to(tl.int32), 0)
            reaches = number >= top_k
            low = tl.where(reaches, middle, low)
            # A quarter more than asked for is near enough: the cut itself is found among ids.
            near = reaches & (number <= top_k + top_k // 4)
            high = tl.where(near, low + 1, tl.where(reaches, high, middle))
    return low << FINE


@triton.jit
def mass_target(mass, top_p):
    """Give what the ids that are held must weigh for top_p of a row's mass."""
    return mass - SLACK * (1.0 - top_p) * mass


@triton.jit
def least_by_mass(
    top, weight, row_max, scale, target, guess, GROUP: tl.constexpr, FINE: tl.constexpr
):
    """Give the largest found t, as `order_bits`, above which the target lies.

    Args:
        top: [G] `order_bits` of the maxima.
        weight: [G] of the groups, relative to the row's maximum.
        target: `mass_target`.
        guess: the part that is counted of what may lie above t or below it; with 0 the target
            lies above for certain.
        FINE: see `least_by_number`.
    """
    own = tl.exp2((ordered_logit(top) - row_max) * scale)
    top = top >> FINE
    low, high, first = search_range(row_max, scale, FINE)
    for n in range(32):
        if high > low + 1:
            middle = tl.where(n == 0, first, middle_of(low, high))
            below = tl.exp2((ordered_logit(middle << FINE) - row_max) * scale)
            sure = tl.maximum(own, weight - (GROUP - 1) * below)
            sure += guess * (weight - sure)
            got = tl.sum(tl.where(top >= middle, sure, 0.0), 0)
            reaches = got >= target
            low = tl.where(reaches, middle, low)
            near = reaches & (got <= target + NEAR * target)
            high = tl.where(near, low + 1, tl.where(reaches, high, middle))
    return low << FINE
