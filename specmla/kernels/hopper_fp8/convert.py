"""e4m3 codes of a stage become the 16-bit keys that are multiplied."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import arrive, barrier, retype, wait
from specmla.kernels.hopper.layouts import BLOCK
from specmla.kernels.hopper_fp8.layouts import CODES, FOUR_WORDS, KEYS

GROUP = gl.constexpr(4)
"""Slices of 64 columns that are converted between two barriers."""
TO_FP16 = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
TO_BF16 = gl.constexpr("""{
.reg .b16 low, high, h0, h1, h2, h3;
.reg .b32 w0, w1;
.reg .f32 f0, f1, f2, f3;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 w0, low;
cvt.rn.f16x2.e4m3x2 w1, high;
mov.b32 {h0, h1}, w0;
mov.b32 {h2, h3}, w1;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
cvt.f32.f16 f2, h2;
cvt.f32.f16 f3, h3;
cvt.rn.bf16x2.f32 $0, f1, f0;
cvt.rn.bf16x2.f32 $1, f3, f2;
}""")
"""Four codes of a word, in order; exact, NaN stays NaN."""


@gluon.jit
def widen(words, dtype: gl.constexpr):
    """Give 64 codes of each key, [64, 16 words], as numbers of `dtype`, [64, 32 words]."""
    asm: gl.constexpr = TO_FP16 if dtype == gl.float16 else TO_BF16
    low, high = gl.inline_asm_elementwise(
        asm, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape([BLOCK, 32])


@gluon.jit
def convert_block(keys_shared, barriers, it):
    """Convert block number `it` in place: its codes lie in the right and the rope part of a stage.

    `GROUP` slices of 64 columns at a time. The left ones go to the left part, out of the way; the
    right ones then cover codes that have been read, their own among them.
    """
    latents, rope = keys_shared
    raw, raw_rope, full, free_left = barriers
    codes = retype(latents, gl.int32, [32, BLOCK, 16], CODES)
    rope_codes = retype(rope, gl.int32, [4, BLOCK, 16], CODES)
    keys = retype(latents, gl.int32, [16, BLOCK, 32], KEYS)
    rope_keys = retype(rope, gl.int32, [2, BLOCK, 32], KEYS)
    stage = it % 2
    phase = it // 2 & 1
    wait(raw_rope.index(stage), phase)
    words = rope_codes.index(2 * stage).load(FOUR_WORDS)
    barrier()
    rope_keys.index(stage).store(widen(words, rope.dtype))
    fence_async_shared()
    barrier()
    arrive(full[8].index(stage))
    wait(free_left.index(stage), phase ^ 1)
    for c in range(it >> 24, 8, GROUP):
        wait(raw.index(stage * (8 // GROUP) + c // GROUP), phase)
        source = 16 + stage * 8 + c
        group = (codes.index(source).load(FOUR_WORDS),)
        for i in gl.static_range(1, GROUP):
            group = group + (codes.index(source + i).load(FOUR_WORDS),)  # noqa: RUF005
        to = c // 4 * 8 + stage * 4 + c % 4
        barrier()
        for i in gl.static_range(GROUP):
            keys.index(to + i).store(widen(group[i], rope.dtype))
        fence_async_shared()
        barrier()
        for i in gl.static_range(8):
            arrive(full[i].index(stage), pred=c == i // GROUP * GROUP)
