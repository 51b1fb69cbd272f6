"""Inline assembly: drop lines of L2 that nobody reads again, before they are written to memory.

Scratch that one kernel writes and the next one reads is dirty in L2. Without this it goes to memory
when later loads evict it: 16.8 MB a call of a verify that all multiprocessors share, 4 us of them.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

LINE_BYTES = gl.constexpr(128)

DISCARD = gl.constexpr(
    "{ .reg .pred used; setp.ne.s32 used, $2, 0; "
    "@used discard.global.L2 [$1], 128; mov.b32 $0, 0; }"
)
"""Result 0; address of a line (64 bits), and whether it is dropped. What the line holds then is
undefined until it is written again."""

DISCARD_OPERANDS = gl.constexpr("=r,l,r")
