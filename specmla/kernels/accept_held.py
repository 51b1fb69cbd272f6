"""Device helpers of rows of which all ids that are kept are held (`filter_rows`).

Arguments that go together are tuples: `held` is pointers to logits and ids [places, SLOTS]; `row`
is (maximum, mass, cut, scale); `drawn` is (part, b, j, draft, is_residual, q, K, W) as `drawn_from`
takes them.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import drawn_from, whole_target, whole_weight
from specmla.kernels.filter_held import load_held


@triton.jit
def held_weights(
    start, held, place, number, row, drawn,
    DENSE: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Give what a token is drawn from, for FEW of the ids that are held, from `start` on."""
    x, ids = load_held(held, place, start, number, drawn[7], SLOTS, FEW)
    return drawn_from(
        ids, x, row[0], row[1], row[3], row[2], drawn[0], drawn[1], drawn[2], drawn[3], drawn[4],
        drawn[5], drawn[6], drawn[7], True, DENSE,
    )  # fmt: skip


@triton.jit
def held_mass(
    held, place, number, row, drawn, DENSE: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr
):
    """Sum what a token is drawn from: in float64, and as `whole_weight` of every FEW ids."""
    part = tl.arange(0, SLOTS // FEW)
    mass, whole = tl.zeros((), tl.float64), tl.zeros((SLOTS // FEW,), tl.int64)
    for start in range(0, number, FEW):
        weight = held_weights(start, held, place, number, row, drawn, DENSE, SLOTS, FEW)
        mass += tl.sum(weight.to(tl.float64), 0)
        whole = tl.where(part == start // FEW, tl.sum(whole_weight(weight), 0), whole)
    return mass, whole


@triton.jit
def draw_held(
    u, held, place, number, row, drawn,
    DENSE: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Draw a token from all that is held, and tell whether there was something to draw from."""
    mass, whole = held_mass(held, place, number, row, drawn, DENSE, SLOTS, FEW)
    # If rounding refused a draft that p equals q for, the token comes from p.
    rest = drawn[4] & (mass != 0)
    drawn = (drawn[0], drawn[1], drawn[2], drawn[3], rest, drawn[5], drawn[6], drawn[7])
    if mass == 0:
        mass, whole = held_mass(held, place, number, row, drawn, DENSE, SLOTS, FEW)
    target = whole_target(u, tl.sum(whole, 0))
    passed = tl.cumsum(whole, 0) <= target
    start = tl.sum(passed.to(tl.int32), 0) * FEW
    target -= tl.sum(tl.where(passed, whole, 0), 0)
    weight = held_weights(start, held, place, number, row, drawn, DENSE, SLOTS, FEW)
    at = start + tl.sum((tl.cumsum(whole_weight(weight), 0) <= target).to(tl.int32), 0)
    at = tl.minimum(at, number - 1)
    token = tl.load(held[1] + place.to(tl.int64) * SLOTS + at)
    return token, (mass > 0) & (mass < 1.0e30)
