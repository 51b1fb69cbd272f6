"""e4m3 codes of a stage become the 16-bit keys that are multiplied."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import arrive, barrier, retype, view, wait
from specmla.kernels.hopper.layouts import BLOCK, TILE
from specmla.kernels.hopper_fp8.layouts import CODES, SIXTEEN

BITS = gl.constexpr(False)
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
BITS_TO_BF16 = gl.constexpr("""{
.reg .b32 w0, w1, u0, u1;
prmt.b32 w0, $2, 0, 0x1404;
prmt.b32 w1, $2, 0, 0x3424;
shr.u32 u0, w0, 4;
shr.u32 u1, w1, 4;
and.b32 u0, u0, 0x07f007f0;
and.b32 u1, u1, 0x07f007f0;
lop3.b32 u0, w0, 0x80008000, u0, 0xea;
lop3.b32 u1, w1, 0x80008000, u1, 0xea;
mul.bf16x2 $0, u0, 0x7b807b80;
mul.bf16x2 $1, u1, 0x7b807b80;
}""")
"""Four codes of a word, in order; exact, NaN stays NaN."""


@gluon.jit
def widen(codes, dtype: gl.constexpr):
    """Give codes as numbers of the query's dtype."""
    if dtype == gl.float16:
        return gl.inline_asm_elementwise(
            TO_FP16, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
        )
    else:
        asm: gl.constexpr = BITS_TO_BF16 if BITS else TO_BF16
        return gl.inline_asm_elementwise(
            asm, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
        )


@gluon.jit
def convert_block(keys_shared, barriers, it):
    """Convert block number `it` in place: its codes lie in the right and the rope part of a stage.

    Slices of 64 columns, two at a time. The left ones go to the left part, out of the way; the
    right ones then cover codes that have been read, but for the last two, which cover their own.
    """
    latents, rope = keys_shared
    raw, raw_rope, full, free_left = barriers
    codes = retype(latents, gl.uint8, [32, BLOCK, 64], CODES)
    rope_codes = retype(rope, gl.uint8, [4, BLOCK, 64], CODES)
    tiles = view(latents, [16, BLOCK, 64], TILE)
    stage = it % 2
    phase = it // 2 & 1
    wait(raw_rope.index(stage), phase)
    values = rope_codes.index(2 * stage).load(SIXTEEN)
    barrier()
    rope.index(stage).store(widen(values, rope.dtype))
    fence_async_shared()
    barrier()
    arrive(full[8].index(stage))
    wait(free_left.index(stage), phase ^ 1)
    for pair in range(it >> 24, 4):
        wait(raw.index(stage * 4 + pair), phase)
        source = 16 + stage * 8 + 2 * pair
        first = codes.index(source).load(SIXTEEN)
        second = codes.index(source + 1).load(SIXTEEN)
        to = pair // 2 * 8 + stage * 4 + pair % 2 * 2
        barrier()
        tiles.index(to).store(widen(first, rope.dtype))
        tiles.index(to + 1).store(widen(second, rope.dtype))
        fence_async_shared()
        barrier()
        for i in gl.static_range(8):
            arrive(full[i].index(stage), pred=pair == i // 2)
