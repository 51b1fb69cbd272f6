"""e4m3 codes to float16 operands of the tensor cores, in registers; exact, NaN stays NaN."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper_fp8.layouts import A_OPERAND

FOUR = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
"""Four codes of a word, in order."""

PAIRS = gl.constexpr("""{
.reg .b32 w0, w1;
.reg .b16 p0, p1, p2, p3;
prmt.b32 w0, $4, $5, 0x5140;
prmt.b32 w1, $4, $5, 0x7362;
mov.b32 {p0, p1}, w0;
mov.b32 {p2, p3}, w1;
cvt.rn.f16x2.e4m3x2 $0, p0;
cvt.rn.f16x2.e4m3x2 $1, p1;
cvt.rn.f16x2.e4m3x2 $2, p2;
cvt.rn.f16x2.e4m3x2 $3, p3;
}""")
"""Codes 0 and 1 of two words, paired: (a0, b0), (a1, b1); then codes 2 and 3."""


@gluon.jit
def query_order(values):
    """Put 64 columns of queries [N, 64] in the order in which `key_operand` has the keys'.

    Column 16 t + 4 j + 2 h + e stands at 16 j + 8 h + 2 t + e.
    """
    rows: gl.constexpr = values.shape[0]
    parts = values.reshape([rows, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    return parts.reshape([rows, 64])


@gluon.jit
def weight_order(weights):
    """Put weights [64 keys, N] in the order in which `value_operand` has the keys.

    Of each 16, key 8 h + 4 e + t stands at 8 h + 2 t + e.
    """
    columns: gl.constexpr = weights.shape[1]
    parts = weights.reshape([4, 2, 2, 4, columns]).permute((0, 1, 3, 2, 4))
    return parts.reshape([64, columns])


@gluon.jit
def key_operand(codes):
    """Convert 64 columns of a block's codes [64 keys, 64] for scores [64 keys, rows]."""
    values = gl.inline_asm_elementwise(
        FOUR, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
    )
    return gl.convert_layout(query_order(values), A_OPERAND, assert_trivial=True)


@gluon.jit
def value_operand(codes):
    """Convert 256 columns of 16 keys, [4, 16 keys, 64], for a product [256 columns, rows].

    Column 64 w + 8 g + 4 i + m of them stands at 64 m + 16 w + 8 i + g; `latent_order` undoes it.
    """
    even, odd = gl.split(codes.reshape([4, 2, 2, 4, 64]).permute((0, 1, 3, 4, 2)))
    # Of 4 codes that are neighbours the outputs hold 2 with both keys each.
    first, second = gl.inline_asm_elementwise(
        PAIRS,
        "=r,=r,=r,=r,r,r",
        [even, odd],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=4,
    )
    # [w, h, t, g, i, low bit of m, e, high bit of m]
    parts = gl.join(first, second).reshape([4, 2, 4, 8, 2, 2, 2, 2])
    values = parts.permute((7, 5, 0, 4, 3, 1, 2, 6)).reshape([256, 16])
    return gl.convert_layout(values, A_OPERAND, assert_trivial=True)


@gluon.jit
def latent_order(acc):
    """Give half an output [256, rows] as [rows, 256], its columns in their own order."""
    rows: gl.constexpr = acc.shape[1]
    parts = acc.reshape([4, 4, 2, 8, rows]).permute((4, 1, 3, 2, 0))
    return parts.reshape([rows, 256])
