"""Queries in, outputs out, and the tail of a stage."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import retype
from specmla.kernels.hopper_fp8.convert import latent_order, query_order
from specmla.kernels.hopper_fp8.layouts import (
    BLOCK,
    COLUMNS,
    FOUR_WORDS,
    QUERY,
    ROWS,
    STAGES,
    WORDS,
)


@gluon.jit
def read_queries(query, first_row, rows, part, H: gl.constexpr):
    """Read 32 rows of queries, 64 columns a part, zeros in rows past the request."""
    latent_ptr, rope_ptr, stride_latent_t, stride_latent_h, stride_rope_t, stride_rope_h = query
    at = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, QUERY))
    cols = gl.arange(0, 64, gl.SliceLayout(0, QUERY))[None, :]
    live = (at < rows * H)[:, None]
    t, h = (first_row + at // H).to(gl.int64), (at % H).to(gl.int64)
    latent = latent_ptr + (t * stride_latent_t + h * stride_latent_h)[:, None] + cols
    rope = rope_ptr + (t * stride_rope_t + h * stride_rope_h)[:, None] + cols
    parts = (gl.load(rope, mask=live, other=0.0),)
    for c in gl.static_range(8):
        parts = parts + (gl.load(latent + c * 64, mask=live, other=0.0),)  # noqa: RUF005
    return parts


@gluon.jit
def query_part(queries, c: gl.constexpr, W: gl.constexpr, zero):
    """Where a partition's queries of a part lie: first rope, then 64 latents each."""
    if c == 0:
        return queries[1].index(zero + W)
    else:
        return queries[0].index(zero + (W * 8 + c - 1))


@gluon.jit
def put_queries(queries, parts, W: gl.constexpr):
    """Store a partition's queries as float16; gives the power of two that each row lacks."""
    top = gl.zeros([ROWS, 64], gl.float32, QUERY)
    for c in gl.static_range(9):
        top = gl.maximum(top, gl.abs(parts[c].to(gl.float32)))
    # Exponents of the rows' largest numbers, which come to lie in [1, 2).
    power = gl.max(top, axis=1).to(gl.int32, bitcast=True) >> 23
    power = gl.minimum(gl.maximum(power, 64), 253)
    down = ((254 - power) << 23).to(gl.float32, bitcast=True)[:, None]
    for c in gl.static_range(9):
        to = query_part(queries, c, W, 0)
        to.store(query_order((parts[c].to(gl.float32) * down).to(gl.float16)))
    up = (power << 23).to(gl.float32, bitcast=True)
    return gl.convert_layout(up, COLUMNS)


@gluon.jit
def clear_tail(latents, stage, held):
    """Zero the codes of keys at or after `held` of a stage: a weight of 0 times NaN is NaN."""
    words = retype(latents, gl.int32, [STAGES * 8, BLOCK, 16], WORDS)
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, FOUR_WORDS))
    for c in gl.static_range(8):
        chunk = words.index(stage * 8 + c)
        codes = chunk.load(FOUR_WORDS)
        chunk.store(gl.where((key < held)[:, None], codes, 0))
    fence_async_shared()


@gluon.jit
def write_out(acc, out_ptr, at_row, first, live_rows, half):
    """Write half the columns of 32 rows from row `first` of a tile, [256, 32], to the output."""
    values = latent_order(acc)
    layout: gl.constexpr = values.type.layout
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = half * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
    to = out_ptr + (at_row + row).to(gl.int64)[:, None] * 512 + col[None, :]
    gl.store(to, values.to(out_ptr.dtype.element_ty), mask=(row < live_rows)[:, None])


@gluon.jit
def half_scale(largest):
    """Powers of two that bring `largest` >= 0 to float16's upper range, and back.

    The first puts it in [2^14, 2^15), the second is its inverse; both are normal float32 numbers
    for any `largest`, 0 included.
    """
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    down = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    return ((268 - exponent) << 23).to(gl.float32, bitcast=True), down


@gluon.jit
def write_part(acc, part_ptr, part_lse_ptr, slot, first, live_rows, half):
    """Write half the columns of 32 rows from row `first` of a tile to its scratch slot.

    The slot is as `hopper.tiles.write_part` lays it out: groups of 8 rows x 8 columns together.
    """
    if part_ptr.dtype.element_ty == gl.float16:
        up, down = half_scale(gl.max(gl.abs(acc), axis=0))
        row = first + gl.arange(0, ROWS, COLUMNS)
        to = part_lse_ptr + (slot * 3 + 1 + half) * BLOCK + row
        gl.store(to, down, mask=row < live_rows)
        acc = (acc * up[None, :]).to(gl.float16)
    groups = latent_order(acc).reshape([4, 8, 32, 8])
    layout: gl.constexpr = groups.type.layout
    no3: gl.constexpr = gl.SliceLayout(3, layout)
    no32: gl.constexpr = gl.SliceLayout(2, no3)
    no31: gl.constexpr = gl.SliceLayout(1, no3)
    no21: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    r8 = gl.arange(0, 4, gl.SliceLayout(1, no32))
    r = gl.arange(0, 8, gl.SliceLayout(0, no32))
    c8 = gl.arange(0, 32, gl.SliceLayout(0, no31))
    c = gl.arange(0, 8, gl.SliceLayout(0, no21))
    at = (r8 * 2048)[:, None, None, None] + (r * 8)[None, :, None, None]
    at = at + (c8 * 64)[None, None, :, None] + c[None, None, None, :]
    live = first + (r8 * 8)[:, None, None, None] + r[None, :, None, None] < live_rows
    base = slot.to(gl.int64) * (2 * BLOCK * 256) + half * (BLOCK * 256) + first * 256
    gl.store(part_ptr + base + at, groups, mask=live)
