"""Filter: the ids of a row that may be kept, held in slots in the order of ids."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import load_logits, order_bits, ordered_logit, sort_key
from specmla.kernels.filter_groups import load_tops, middle_of

FEW = 4
"""A row that fills no more than this part of its slots looks at no others, nor does one that fills
no more than twice of it look at more than twice."""

TILE = 128
"""Groups of 16-bit logits that are read at a time, but no more than there are slots."""


GONE = tl.constexpr(-(2**31))
"""In place of `order_bits` of an id that is not kept."""


@triton.jit
def load_groups(at, start, groups, W, TILE: tl.constexpr):
    """Load the numbers [TILE] of listed groups; after the last one, of a group without ids."""
    lane = start + tl.arange(0, TILE)
    return tl.load(at + lane, mask=lane < groups, other=W)


@triton.jit
def group_ids(group, GROUP: tl.constexpr):
    """Give the ids of groups [TILE, GROUP]."""
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def count_bits(bits):
    """Count the bits of int32 numbers that are set."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def mark_ids(
    at, groups, least, logits_ptr, row, W, SLOTS: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Leave a word for each listed group: bit n is set where its id n reaches logit `least`.

    at: pointer to the row's groups, SLOTS before their words.
    """
    lane = tl.arange(0, GROUP)[None, :]
    # Tiles are asked for one ahead, their groups two ahead: nothing waits for both.
    group = load_groups(at, 0, groups, W, TILE)
    later = load_groups(at, TILE, groups, W, TILE)
    x = load_logits(logits_ptr, row, group_ids(group, GROUP), W)
    for start in range(0, groups, TILE):
        ahead = load_logits(logits_ptr, row, group_ids(later, GROUP), W)
        last = load_groups(at, start + 2 * TILE, groups, W, TILE)
        word = tl.sum((x >= least).to(tl.int32) << lane, 1)
        listed = start + tl.arange(0, TILE)
        tl.store(at + SLOTS + listed, word, mask=listed < groups)
        x, group, later = ahead, later, last


@triton.jit
def list_ids(
    to, at, groups, W, SLOTS: tl.constexpr, FEW: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """List the marked ids at `to`, rising, no more than SLOTS; give how many there are."""
    number = groups * 0
    for start in range(0, groups, FEW):
        listed = start + tl.arange(0, FEW)
        first = load_groups(at, start, groups, W, FEW) * GROUP
        word = tl.load(at + SLOTS + listed, mask=listed < groups, other=0)
        count = count_bits(word)
        slot = number + tl.cumsum(count, 0) - count
        number += tl.sum(count, 0)
        # A group rarely holds more than a few.
        for _ in range(tl.max(count, 0)):
            lowest = (word & -word).to(tl.float32).to(tl.int32, bitcast=True)
            bit = ((lowest >> 23) & 255) - 127
            tl.store(to + slot, first + bit, mask=(word != 0) & (slot < SLOTS))
            word, slot = word & (word - 1), slot + 1
    return number


@triton.jit
def hold_ids(
    held, place, least, top_at, logits_ptr, row, row_max, scale, W,
    SLOTS: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Hold the ids whose `order_bits` are at least `least`; give their number and their weight.

    If there are more than SLOTS, they are not all held, and the weight is not known.

    Args:
        held: pointers to logits and ids [places, SLOTS], and to groups [places, 2 * SLOTS].
        top_at: what `load_tops` takes.
    """
    found_ptr, found_id_ptr, group_ptr = held
    to, at = place.to(tl.int64) * SLOTS, group_ptr + place.to(tl.int64) * 2 * SLOTS
    chosen = load_tops(top_at, GROUPS) >= least
    # Every group that is chosen holds an id: there are no fewer ids than groups.
    number, mass = tl.sum(chosen.to(tl.int32), 0), 0.0 * scale
    if number <= SLOTS:
        groups = number
        listed = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(at + listed, tl.arange(0, GROUPS), mask=chosen)
        tl.debug_barrier()
        mark_ids(at, groups, ordered_logit(least), logits_ptr, row, W, SLOTS, TILE, GROUP)
        tl.debug_barrier()
        number = list_ids(found_id_ptr + to, at, groups, W, SLOTS, FEW, GROUP)
        tl.debug_barrier()
        weight = tl.zeros((FEW,), tl.float32)
        for start in range(0, tl.minimum(number, SLOTS), FEW):
            slot = start + tl.arange(0, FEW)
            ids = tl.load(found_id_ptr + to + slot, mask=slot < number, other=W)
            x = load_logits(logits_ptr, row, ids, W)
            tl.store(found_ptr + to + slot, x, mask=slot < number)
            weight += tl.exp2((x - row_max) * scale)
        mass = tl.sum(weight, 0)
        tl.debug_barrier()
    return number, mass


@triton.jit
def load_held(held, place, start, number, W, SLOTS: tl.constexpr, SIZE: tl.constexpr):
    """Give SIZE logits and ids that are held of a row from `start` on; -inf, W after the last."""
    slot = start + tl.arange(0, SIZE)
    at = place.to(tl.int64) * SLOTS + slot
    x = tl.load(held[0] + at, mask=slot < number, other=float("-inf"))
    return x, tl.load(held[1] + at, mask=slot < number, other=W)


@triton.jit
def top_part(target, least, high, ordered, weight):
    """Tell which ids [N] are the fewest of the top whose weight reaches the target.

    All, if the sum of all rounds below it.

    Args:
        target: of the sum, in the type of the weights.
        least, high: all `ordered` that weigh lie from `least` to below `high`.
        ordered: [N] `order_bits`, less those that no logit has, equal ones by rising id.
        weight: [N], 0 where an id is out of the question.
    """
    low = least
    for _ in range(32):
        if high > low + 1:
            middle = middle_of(low, high)
            reaches = tl.sum(tl.where(ordered >= middle, weight, 0), 0) >= target
            low = tl.where(reaches, middle, low)
            high = tl.where(reaches, high, middle)
    above = tl.sum(tl.where(ordered > low, weight, 0), 0)
    # Equal logits weigh the same: the n-th of them is one of the fewest if n - 1 do not suffice.
    each = tl.max(tl.where(ordered == low, weight, 0), 0)
    counts = (ordered == low) & (weight > 0)
    before = tl.cumsum(counts.to(tl.int32), 0) - 1
    return (ordered > low) | (counts & (above + before * each < target))


@triton.jit
def cut_held(
    held, place, number, mass, row_max, scale, edge, filters, W,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Give cut and mass of a row of which all ids that matter are held.

    Args:
        mass: of all ids of the row; what top-p is a part of, unless ids are left out before.
        edge: `order_bits` of the least logit that min-p keeps.
        filters: top_k, top_p and min_p.
        FINE: low bits of `order_bits` in which no two logits of the row differ.
    """
    top_k, top_p, min_p = filters
    x, _ids = load_held(held, place, 0, number, W, SLOTS, SIZE)
    live = (tl.arange(0, SIZE) < number) & (order_bits(x) >= edge)
    ordered = tl.where(live, order_bits(x) >> FINE, GONE)
    low = tl.min(tl.where(ordered > GONE, ordered, 2147483647), 0)
    high = (order_bits(row_max) >> FINE) + 1
    by_number = (top_k > 0) & (top_k < W)
    if by_number:
        one = (ordered > GONE).to(tl.int32)
        ordered = tl.where(top_part(top_k.to(tl.int32), low, high, ordered, one), ordered, GONE)
        # Loaded again, here and below, so that no register holds them through a search.
        x, _ids = load_held(held, place, 0, number, W, SLOTS, SIZE)
    weight = tl.where(ordered > GONE, tl.exp2((x - row_max) * scale), 0.0).to(tl.float64)
    if by_number | (min_p > 0):
        mass = tl.sum(weight, 0)
    if top_p < 1:
        kept = top_part(tl.maximum(top_p * mass, 1.0e-30), low, high, ordered, weight)
        ordered = tl.where(kept, ordered, GONE)
    mass = tl.sum(tl.where(ordered > GONE, weight, 0.0), 0)
    x, ids = load_held(held, place, 0, number, W, SLOTS, SIZE)
    least = tl.min(tl.where(ordered > GONE, x, float("inf")), 0)
    last = tl.max(tl.where((ordered > GONE) & (x == least), ids, 0), 0)
    return sort_key(least, last), mass
