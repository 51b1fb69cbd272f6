"""Reads and writes of whole tiles: queries, outputs, partial outputs, the tail of a stage."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import barrier, view
from specmla.kernels.hopper.layouts import BLOCK, HALF, NARROW, TILE


@gluon.jit
def query_rows(ptr, stride_t, stride_h, first_row, rows, tile, H: gl.constexpr):
    """Pointers [64, 64] to the first columns of a tile's queries, and which rows are real.

    Rows past the request stand for its last one: what they give is never written, and a load
    without a mask takes no registers to be cleared before it.
    """
    row = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW))
    at = gl.minimum(row, rows * H - 1)
    t = (first_row + at // H).to(gl.int64) * stride_t
    h = (at % H).to(gl.int64) * stride_h
    cols = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    return (ptr + t + h)[:, None] + cols[None, :], (row < rows * H)[:, None]


@gluon.jit
def read_half(ptr, stride_t, stride_h, first_row, rows, tile, half, H: gl.constexpr):
    """Read 256 columns of a tile's queries, 64 a part."""
    source, _live = query_rows(ptr, stride_t, stride_h, first_row, rows, tile, H)
    source += half * HALF
    v0 = gl.load(source)
    v1 = gl.load(source + 64)
    v2 = gl.load(source + 128)
    v3 = gl.load(source + 192)
    return v0, v1, v2, v3


@gluon.jit
def read_rope(ptr, stride_t, stride_h, first_row, rows, tile, H: gl.constexpr):
    """Read the rope part of a tile's queries."""
    source, _live = query_rows(ptr, stride_t, stride_h, first_row, rows, tile, H)
    return gl.load(source)


@gluon.jit
def put_half(to, parts):
    """Store the four parts of a half to shared memory."""
    for c in gl.static_range(4):
        to.slice(c * 64, 64, dim=1).store(parts[c])


@gluon.jit
def write_out(acc, out_ptr, buffer, first_row, rows, tile, half, H: gl.constexpr):
    """Write a half [64, 256] of a tile to the output, by rows, through shared memory."""
    buffer.store(acc.to(buffer.dtype))
    barrier()
    to, live = query_rows(out_ptr, H * 2 * HALF, 2 * HALF, first_row, rows, tile, H)
    for c in gl.static_range(4):
        value = buffer.slice(c * 64, 64, dim=1).load(NARROW)
        gl.store(to + (half * HALF + c * 64), value, mask=live)


@gluon.jit
def write_part(acc, part_ptr, slot, live_rows, half):
    """Write a half [64, 256] of a tile to its scratch slot, in float32, as it was summed up.

    Dividing by the sum of weights is left to the merge: what runs once in a launch costs most by
    the instructions that have to be fetched for it.

    Groups of 8 rows x 8 columns lie together: each store of a warp is one run of 256 bytes. The
    reshaped tile has one base address and constant offsets; `row // 8` and `row % 8` of a tile
    [64, 256] would be an address a register.
    """
    groups = acc.reshape([8, 8, 32, 8])
    layout: gl.constexpr = groups.type.layout
    no3: gl.constexpr = gl.SliceLayout(3, layout)
    no32: gl.constexpr = gl.SliceLayout(2, no3)
    no31: gl.constexpr = gl.SliceLayout(1, no3)
    no21: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    r8 = gl.arange(0, 8, gl.SliceLayout(1, no32))
    r = gl.arange(0, 8, gl.SliceLayout(0, no32))
    c8 = gl.arange(0, 32, gl.SliceLayout(0, no31))
    c = gl.arange(0, 8, gl.SliceLayout(0, no21))
    at = (r8 * 2048)[:, None, None, None] + (r * 8)[None, :, None, None]
    at = at + (c8 * 64)[None, None, :, None] + c[None, None, None, :]
    live = (r8 * 8)[:, None, None, None] + r[None, :, None, None] < live_rows
    to = part_ptr + (slot.to(gl.int64) * (2 * BLOCK * HALF) + half * BLOCK * HALF)
    gl.store(to + at, groups, mask=live)


@gluon.jit
def clear_tail(half, stage, held, zero):
    """Zero the rows at or after `held` of a stage's half: a weight of 0 times NaN is NaN.

    A loop, for fewer instructions to fetch: it runs once in a request.
    """
    parts = view(half, [8, BLOCK, 64], TILE)
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW))
    for c in range(zero, 4):
        chunk = parts.index(stage * 4 + c)
        value = chunk.load(NARROW)
        chunk.store(gl.where((row < held)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    barrier()
