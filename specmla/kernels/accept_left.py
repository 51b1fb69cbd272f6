"""Device helpers of trees: what is left of a row after some of its children were refused.

Arguments that go together are tuples: `row` is (row of the logits, maximum, mass, cut, scale),
`refs` is (b, logits, drafts, q, K, W, C) and `held` is (ids, first slot of the row, how many there
are). A row is looked at in pieces of SIZE ids: of all, or of those that are held.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import load_logits, pick, weigh


@triton.jit
def left_over(ids, row, bits, norm, refs, DENSE: tl.constexpr):
    """Give what is left of p at ids [N].

    bits: bit n stands for refused child n; they were tried in that order. norm: [WIDTH] float32,
    the mass that was left before each of them.
    """
    at, row_max, row_mass, cut, scale = row
    b, logits_ptr, drafts_ptr, q_ptr, K, W, _ = refs
    x = load_logits(logits_ptr, at, ids, W)
    left = weigh(x, ids, row_max, scale, cut, True) / row_mass
    for n in range(K):
        if ((bits >> n) & 1) != 0:
            if DENSE:
                lane = tl.arange(0, norm.shape[0])
                mass = tl.sum(tl.where(lane == n, norm, 0.0), 0)
                q = q_ptr + (b * K + n).to(tl.int64) * W + ids
                rest = left / mass - tl.load(q, mask=ids < W, other=0.0)
                left = tl.where(rest < 0, 0.0, rest)  # NaN of q stays, and flags the row
            else:
                left = tl.where(ids == tl.load(drafts_ptr + b * K + n), 0.0, left)
    return left


@triton.jit
def piece_ids(piece, held, W, HELD: tl.constexpr, SIZE: tl.constexpr):
    """Give the ids [SIZE] of a piece; W where there is none."""
    at = piece * SIZE + tl.arange(0, SIZE)
    if HELD:
        return tl.load(held[0] + held[1] + at, mask=at < held[2], other=W)
    return at


@triton.jit
def left_masses(
    held, row, bits, norm, refs,
    DENSE: tl.constexpr, HELD: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Give the mass [CHUNKS] float64 of every piece of what is left."""
    chunks, found = tl.arange(0, CHUNKS), tl.zeros((CHUNKS,), tl.float64)
    pieces = tl.cdiv(held[2], SIZE) if HELD else refs[6]
    for piece in range(pieces):
        ids = piece_ids(piece, held, refs[5], HELD, SIZE)
        left = left_over(ids, row, bits, norm, refs, DENSE)
        found = tl.where(chunks == piece, tl.sum(left, 0).to(tl.float64), found)
    return found


@triton.jit
def draw_left(
    u, masses, held, row, bits, norm, refs,
    DENSE: tl.constexpr, HELD: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Draw a token from what is left, whose masses are known; tell whether there was anything."""
    chunks, total = tl.arange(0, CHUNKS), tl.sum(masses, 0)
    chunk = tl.sum((tl.cumsum(masses, 0) <= u * total).to(tl.int32), 0)
    chunk = tl.minimum(chunk, tl.max(tl.where(masses > 0, chunks, 0), 0))
    mine = tl.sum(tl.where(chunks == chunk, masses, 0.0), 0)
    start = tl.sum(tl.where(chunks < chunk, masses, 0.0), 0)
    left = left_over(piece_ids(chunk, held, refs[5], HELD, SIZE), row, bits, norm, refs, DENSE)
    token = chunk * SIZE + pick(left, tl.maximum((u * total - start) / mine, 0.0))
    if HELD:
        token = tl.load(held[0] + held[1] + tl.maximum(tl.minimum(token, held[2] - 1), 0))
    token = tl.minimum(tl.maximum(token, 0), refs[5] - 1)
    return token.to(tl.int64), (total > 0) & (total < 1.0e30)


@triton.jit
def test_child(node, u, row, bits, norm, mass, refs, DENSE: tl.constexpr):
    """Test child `node`, -1 for none, against what is left, `mass` in all: tell whether it stands,
    and whether it takes something away if it does not."""
    b, _, drafts_ptr, q_ptr, K, W, _ = refs
    draft = tl.load(drafts_ptr + b * K + node, mask=node >= 0, other=-1)
    inside = (draft >= 0) & (draft < W)
    at = tl.where(inside, draft, 0)
    chance = left_over(at, row, bits, norm, refs, DENSE) / mass
    if DENSE:
        place = q_ptr + (b * K + node).to(tl.int64) * W + at
        q = tl.load(place, mask=inside, other=0.0)
        chance = tl.where(q > 0, chance / tl.where(q > 0, q, 1.0), 0.0)
    stands = inside & (u < chance.to(tl.float64))
    return stands, ((draft >= 0) if DENSE else inside) & (stands == 0)
