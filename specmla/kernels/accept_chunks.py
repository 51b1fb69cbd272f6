"""Device helpers of rows that are drawn from by chunks: masses of all, then one chunk looked at.

Arguments that go together are tuples: `row` is (maximum, mass, cut, scale); `refs` is (logits, row
of the logits, C); `drawn` is (part, b, j, draft, is_residual, q, K, W) as `drawn_from` takes them.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.accept_prims import KEEP_ALL, drawn_from, load_logits, pick


@triton.jit
def row_masses(
    row, refs, drawn, FILTER: tl.constexpr, DENSE: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the mass [CHUNKS] float64 of every chunk of what a token is drawn from, reading them."""
    chunks, mass = tl.arange(0, CHUNKS), tl.zeros((CHUNKS,), tl.float64)
    for chunk in range(refs[2]):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        rest = drawn_from(
            ids, load_logits(refs[0], refs[1], ids, drawn[7]), row[0], row[1], row[3], row[2],
            drawn[0], drawn[1], drawn[2], drawn[3], drawn[4], drawn[5], drawn[6], drawn[7],
            FILTER, DENSE,
        )  # fmt: skip
        mass = tl.where(chunks == chunk, tl.sum(rest, 0).to(tl.float64), mass)
    return mass


@triton.jit
def part_masses(
    row, refs, drawn, parts, place, FILTER: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Give what `row_masses` does for one-hot q where all ids are kept: it follows from the parts,
    but for the chunk in which the refused draft is."""
    chunks, own, W = tl.arange(0, CHUNKS), drawn[3], drawn[7]
    live = chunks < refs[2]
    top = tl.load(parts[0] + place * refs[2] + chunks, mask=live, other=float("-inf"))
    kept = tl.load(parts[1] + place * refs[2] + chunks, mask=live, other=0.0)
    kept = drawn[0] * (kept * tl.exp2((top - row[0]) * row[3]) / row[1])
    mass = tl.where(top > float("-inf"), kept, 0.0).to(tl.float64)
    if drawn[4] & (own < W):
        ids = own // BLOCK * BLOCK + tl.arange(0, BLOCK)
        rest = drawn_from(
            ids, load_logits(refs[0], refs[1], ids, W), row[0], row[1], row[3], row[2], drawn[0],
            drawn[1], drawn[2], own, drawn[4], drawn[5], drawn[6], W, FILTER, False,
        )  # fmt: skip
        mass = tl.where(chunks == own // BLOCK, tl.sum(rest, 0).to(tl.float64), mass)
    return mass


@triton.jit
def draw_chunk(
    u, mass, row, refs, drawn, FILTER: tl.constexpr, DENSE: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token from a row by the masses [CHUNKS] of its chunks; tell whether there was any."""
    total, residual = tl.sum(mass, 0), drawn[4]
    residual = residual & (total != 0)
    drawn = (drawn[0], drawn[1], drawn[2], drawn[3], residual, drawn[5], drawn[6], drawn[7])
    if total == 0:
        # Rounding refused a draft that p equals q for: the token comes from p.
        mass = row_masses(row, refs, drawn, FILTER, DENSE, CHUNKS, BLOCK)
        total = tl.sum(mass, 0)
    chunks, W = tl.arange(0, CHUNKS), drawn[7]
    chunk = tl.sum((tl.cumsum(mass, 0) <= u * total).to(tl.int32), 0)
    chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0, chunks, 0), 0))
    mine = tl.sum(tl.where(chunks == chunk, mass, 0.0), 0)
    start = tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    weight = drawn_from(
        ids, load_logits(refs[0], refs[1], ids, W), row[0], row[1], row[3], row[2], drawn[0],
        drawn[1], drawn[2], drawn[3], residual, drawn[5], drawn[6], W, FILTER, DENSE,
    )  # fmt: skip
    token = chunk * BLOCK + pick(weight, tl.maximum((u * total - start) / mine, 0.0))
    return token, (total > 0) & (total < 1.0e30)


@triton.jit
def draw_all(
    u, mass_at, parts, place, row, refs, drawn,
    FILTER: tl.constexpr, DENSE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a token from a row that may keep any id; tell whether there was something.

    mass_at: pointer to the masses of its chunks, if DENSE.
    """
    chunks = tl.arange(0, CHUNKS)
    if DENSE:
        mass = tl.load(mass_at + chunks, mask=chunks < refs[2], other=0.0).to(tl.float64)
    elif not FILTER or row[2] == KEEP_ALL:
        mass = part_masses(row, refs, drawn, parts, place, FILTER, CHUNKS, BLOCK)
    else:
        mass = row_masses(row, refs, drawn, FILTER, DENSE, CHUNKS, BLOCK)
    token, good = draw_chunk(u, mass, row, refs, drawn, FILTER, DENSE, CHUNKS, BLOCK)
    return token, good
