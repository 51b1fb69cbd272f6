"""Constants and data layouts of the Hopper kernel."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

FLOOR = gl.constexpr(-1.0e30)
LN_2 = gl.constexpr(0.6931471805599453)
HALF = gl.constexpr(256)
BLOCK = gl.constexpr(64)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))
S_ROWS = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
S_COLS = gl.constexpr(gl.SliceLayout(0, S_LAYOUT.value))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of 64 columns, 16 bytes a thread."""
ALL_ROWS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
"""Every warp holds all rows: reductions stay within a warp."""
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
COPY = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
