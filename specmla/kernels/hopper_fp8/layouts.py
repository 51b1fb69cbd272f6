"""Data layouts of raw codes on their way through shared memory."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

CODES_3D = gl.constexpr(gl.NVMMASharedLayout(64, 8, rank=3))
CODES = gl.constexpr(gl.NVMMASharedLayout(64, 32, rank=2))
"""Of [64 keys, 16 words]: the same, four codes at a time."""
KEYS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""Of [64 keys, 32 words]: `hopper.layouts.TILE`, two numbers at a time."""
FOUR_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""Of [64 keys, 16 words]: 16 neighbouring codes a thread.

Eight lanes read 128 bytes in a row. The 16 bytes that they then write at a time are every second
ones of a key and of its neighbour, which the swizzle of `KEYS` puts into 8 banks of their own.
"""
