"""Data layouts of raw codes on their way through shared memory."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

CODES = gl.constexpr(gl.NVMMASharedLayout(64, 8, rank=2))
CODES_3D = gl.constexpr(gl.NVMMASharedLayout(64, 8, rank=3))
SIXTEEN = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
"""Of [64 keys, 64 codes]: 16 neighbouring codes a thread.

Eight lanes read 128 bytes in a row. The 16 bytes that they then write at a time are every second
ones of a key and of its neighbour, which the swizzle of `hopper.layouts.TILE` puts into 8 banks of
their own.
"""
