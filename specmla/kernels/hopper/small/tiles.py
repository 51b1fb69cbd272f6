"""Reads and writes of a pass: queries, outputs, partial outputs."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.gluon_api import barrier
from specmla.kernels.hopper.layouts import BLOCK, HALF, NARROW


@gluon.jit
def query_rows(ptr, stride_t, stride_h, piece, H: gl.constexpr, N: gl.constexpr):
    """Pointers [N, 64] to the first columns of a pass's queries, and which rows are real.

    Rows past the request stand for its last one; what they give is never written.
    """
    first_row, rows, base = piece
    row = base + gl.arange(0, N, gl.SliceLayout(1, NARROW))
    at = gl.minimum(row, rows * H - 1)
    t = (first_row + at // H).to(gl.int64) * stride_t
    h = (at % H).to(gl.int64) * stride_h
    cols = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    return (ptr + t + h)[:, None] + cols[None, :], (row < rows * H)[:, None]


@gluon.jit
def read_half(ptr, stride_t, stride_h, piece, half, H: gl.constexpr, N: gl.constexpr):
    """Read 256 columns of a pass's queries, 64 a part."""
    source, _live = query_rows(ptr, stride_t, stride_h, piece, H, N)
    source += half * HALF
    v0 = gl.load(source)
    v1 = gl.load(source + 64)
    v2 = gl.load(source + 128)
    v3 = gl.load(source + 192)
    return v0, v1, v2, v3


@gluon.jit
def read_rope(ptr, stride_t, stride_h, piece, H: gl.constexpr, N: gl.constexpr):
    """Read the rope part of a pass's queries."""
    source, _live = query_rows(ptr, stride_t, stride_h, piece, H, N)
    return gl.load(source)


@gluon.jit
def write_out(acc, out_ptr, buffer, piece, half, H: gl.constexpr, N: gl.constexpr):
    """Write a half [256, N] of a pass to the output, by rows, through shared memory [N, 256]."""
    buffer.permute((1, 0)).store(acc.to(buffer.dtype))
    barrier()
    to, live = query_rows(out_ptr, H * 2 * HALF, 2 * HALF, piece, H, N)
    for c in gl.static_range(4):
        value = buffer.slice(c * 64, 64, dim=1).load(NARROW)
        gl.store(to + (half * HALF + c * 64), value, mask=live)


@gluon.jit
def write_part(acc, part_ptr, slot, row, live_rows, half, N: gl.constexpr):
    """Write a half [256, N] of a pass, from `row` of its tile on, to its slot, as it was summed up.

    Groups of 8 rows x 8 columns lie together, as `merge.py` reads them.
    """
    groups = acc.reshape([32, 8, N // 8, 8])
    layout: gl.constexpr = groups.type.layout
    no3: gl.constexpr = gl.SliceLayout(3, layout)
    no32: gl.constexpr = gl.SliceLayout(2, no3)
    no31: gl.constexpr = gl.SliceLayout(1, no3)
    no21: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    c8 = gl.arange(0, 32, gl.SliceLayout(1, no32))
    c = gl.arange(0, 8, gl.SliceLayout(0, no32))
    r8 = gl.arange(0, N // 8, gl.SliceLayout(0, no31))
    r = gl.arange(0, 8, gl.SliceLayout(0, no21))
    at = (c8 * 64)[:, None, None, None] + c[None, :, None, None]
    at = at + (r8 * 2048)[None, None, :, None] + (r * 8)[None, None, None, :]
    live = row + (r8 * 8)[None, None, :, None] + r[None, None, None, :] < live_rows
    to = part_ptr + (slot.to(gl.int64) * (2 * BLOCK * HALF) + half * BLOCK * HALF + row * HALF)
    gl.store(to + at, groups, mask=live)
