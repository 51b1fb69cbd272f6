"""Filter: the ids of a row that may be kept, held in slots in the order of ids."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import load_logits, order_bits, sort_key
from specmla.kernels.filter_groups import load_tops, middle_of

FEW = 4
"""A row that fills no more than this part of its slots looks at no others."""

TILE = 64
"""Groups of 16-bit logits that are read at a time, but no more than there are slots."""


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
def hold_ids(
    held, place, least, top_at, logits_ptr, row, row_max, scale, W,
    SLOTS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Hold the ids whose `order_bits` are at least `least`; give their number and their weight.

    If there are more than SLOTS, they are not all held, and the weight is not known.

    Args:
        held: pointers to logits, ids and groups [places, SLOTS].
        top_at: what `load_tops` takes.
    """
    found_ptr, found_id_ptr, group_ptr = held
    at = place.to(tl.int64) * SLOTS
    chosen = load_tops(top_at, GROUPS) >= least
    # Every group that is chosen holds an id: there are no fewer ids than groups.
    number, mass = tl.sum(chosen.to(tl.int32), 0), 0.0 * scale
    if number <= SLOTS:
        groups = number
        listed = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(group_ptr + at + listed, tl.arange(0, GROUPS), mask=chosen)
        tl.debug_barrier()
        number, weight = groups * 0, tl.zeros((TILE,), tl.float32)
        # Tiles are asked for one ahead, their groups two ahead: nothing waits for both.
        group = load_groups(group_ptr + at, 0, groups, W, TILE)
        later = load_groups(group_ptr + at, TILE, groups, W, TILE)
        x = load_logits(logits_ptr, row, group_ids(group, GROUP), W)
        for start in range(0, groups, TILE):
            ahead = load_logits(logits_ptr, row, group_ids(later, GROUP), W)
            last = load_groups(group_ptr + at, start + 2 * TILE, groups, W, TILE)
            ids = group_ids(group, GROUP)
            mine = ((order_bits(x) >= least) & (ids < W)).to(tl.int32)
            count = tl.sum(mine, 1)
            first = number + tl.cumsum(count, 0) - count
            slot = first[:, None] + tl.cumsum(mine, 1) - 1
            use = (mine != 0) & (slot < SLOTS)
            tl.store(found_ptr + at + slot, x, mask=use)
            tl.store(found_id_ptr + at + slot, ids, mask=use)
            number += tl.sum(count, 0)
            weight += tl.sum(tl.where(mine != 0, tl.exp2((x - row_max) * scale), 0.0), 1)
            x, group, later = ahead, later, last
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
    ordered = order_bits(x) >> FINE
    low = tl.min(tl.where(live, ordered, 2147483647), 0)
    high = (order_bits(row_max) >> FINE) + 1
    by_number = (top_k > 0) & (top_k < W)
    if by_number:
        live = live & top_part(top_k.to(tl.int32), low, high, ordered, live.to(tl.int32))
    weight = tl.where(live, tl.exp2((x - row_max) * scale), 0.0).to(tl.float64)
    if by_number | (min_p > 0):
        mass = tl.sum(weight, 0)
    if top_p < 1:
        live = live & top_part(tl.maximum(top_p * mass, 1.0e-30), low, high, ordered, weight)
    mass = tl.sum(tl.where(live, weight, 0.0), 0)
    least = tl.min(tl.where(live, x, float("inf")), 0)
    _x, ids = load_held(held, place, 0, number, W, SLOTS, SIZE)
    last = tl.max(tl.where(live & (x == least), ids, 0), 0)
    return sort_key(least, last), mass
