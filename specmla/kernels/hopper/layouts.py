"""Constants and data layouts of the Hopper kernel, and its reads and writes of whole tiles."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import barrier

FLOOR = gl.constexpr(-1.0e30)
LN_2 = gl.constexpr(0.6931471805599453)
HALF = gl.constexpr(256)
BLOCK = gl.constexpr(64)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))
S_ROWS = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
S_COLS = gl.constexpr(gl.SliceLayout(0, S_LAYOUT.value))
O_ROWS = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""Rows of 256 columns, 16 bytes a thread: a warp moves one row at a time."""
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
COPY = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FIELDS = gl.constexpr(16)
"""Ints of a program's record, see `schedule_line.PROGRAM_FIELDS`."""


@gluon.jit
def read_half(q_ptr, stride_t, stride_h, first_row, rows, tile, half, to, H: gl.constexpr):
    """Copy 256 columns of a tile's queries to shared memory, zeros in rows past the request."""
    at = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
    t = (first_row + at // H).to(gl.int64)
    h = (at % H).to(gl.int64)
    cols = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
    source = (q_ptr + t * stride_t + h * stride_h)[:, None] + cols[None, :]
    to.store(gl.load(source, mask=(at < rows * H)[:, None], other=0.0))


@gluon.jit
def read_rope(q_ptr, stride_t, stride_h, first_row, rows, tile, to, H: gl.constexpr):
    """Copy the rope part of a tile's queries to shared memory, zeros in rows past the request."""
    wide = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW))
    rope_t = (first_row + wide // H).to(gl.int64) * stride_t
    rope_h = (wide % H).to(gl.int64) * stride_h
    cols = gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    source = (q_ptr + rope_t + rope_h)[:, None] + cols[None, :]
    to.store(gl.load(source, mask=(wide < rows * H)[:, None], other=0.0))


@gluon.jit
def write_out(acc, out_ptr, buffer, first_row, rows, tile, half, H: gl.constexpr):
    """Write a half [64, 256] of a tile to the output, by rows, through shared memory."""
    buffer.store(acc.to(buffer.dtype))
    barrier()
    value = buffer.load(WIDE)
    at = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
    cols = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
    row = (first_row * H + at).to(gl.int64) * (2 * HALF)
    gl.store(out_ptr + row[:, None] + cols[None, :], value, mask=(at < rows * H)[:, None])


@gluon.jit
def write_part(acc, part_ptr, slot, live_rows, half):
    """Write a half [64, 256] of a tile to its scratch slot, in float32.

    Groups of 8 rows x 8 columns lie together: each store of a warp is one run of 256 bytes.
    """
    at = gl.arange(0, BLOCK, O_ROWS)
    cols = gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
    row = at // 8 * (8 * HALF) + at % 8 * 8
    col = cols // 8 * 64 + cols % 8
    to = part_ptr + (slot.to(gl.int64) * (2 * BLOCK * HALF) + half * BLOCK * HALF)
    gl.store(to + (row[:, None] + col[None, :]), acc, mask=(at < live_rows)[:, None])


@gluon.jit
def clear_tail(part, held):
    """Zero the rows at or after `held` of a part [64, 256]: a weight of 0 times NaN is NaN."""
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW))
    for c in gl.static_range(4):
        chunk = part.slice(c * 64, 64, dim=1)
        value = chunk.load(NARROW)
        chunk.store(gl.where((row < held)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    barrier()
