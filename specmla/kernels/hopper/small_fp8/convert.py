"""e4m3 codes to float16 operands of the tensor cores, in registers; exact, NaN stays NaN."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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

    Column 16 j + 4 t + 2 h + e stands at 16 t + 8 h + 2 j + e.
    """
    rows: gl.constexpr = values.shape[0]
    parts = values.reshape([rows, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    return parts.reshape([rows, 64])


@gluon.jit
def key_operand(codes, layout: gl.constexpr):
    """Convert 64 or 128 columns of a block's codes [64 keys, W] for scores [64 keys, rows]."""
    W: gl.constexpr = codes.shape[1]
    values = gl.inline_asm_elementwise(
        FOUR, "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4
    )
    # [warp, key 8, key 4, key 2, key 1, column 64, j, t, h, e]
    parts = values.reshape([4, 2, 2, 2, 2, W // 64, 4, 4, 2, 2])
    parts = parts.permute((0, 1, 3, 4, 2, 5, 7, 8, 6, 9)).reshape([64, W])
    return gl.convert_layout(parts, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def value_operand(codes, layout: gl.constexpr):
    """Convert 256 columns of some keys, [2, K, 128], for a product [256 columns, rows].

    `latent_order` puts the product's columns in their own order.
    """
    K: gl.constexpr = codes.shape[1]
    even, odd = gl.split(codes.reshape([2, K // 8, 2, 4, 128]).permute((0, 1, 3, 4, 2)))
    # Of 4 codes that are neighbours the outputs hold 2 with both keys each.
    first, second = gl.inline_asm_elementwise(
        PAIRS,
        "=r,=r,=r,=r,r,r",
        [even, odd],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=4,
    )
    # [box, key 8 and up, j, column 64, 32, 16, 8, 4, 1, key 4, column 2]
    parts = gl.join(first, second).reshape([2, K // 8, 4, 2, 2, 2, 2, 2, 2, 2, 2])
    parts = parts.permute((7, 10, 0, 4, 8, 5, 3, 6, 1, 2, 9)).reshape([256, K])
    return gl.convert_layout(parts, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def latent_order(acc):
    """Give half an output [256, N] as [N, 256], its columns in their own order."""
    rows: gl.constexpr = acc.shape[1]
    # [column 4, 2, 128, 32, 1, 16, 64, 8, row]
    parts = acc.reshape([2, 2, 2, 2, 2, 2, 2, 2, rows])
    return parts.permute((8, 2, 6, 3, 5, 7, 0, 1, 4)).reshape([rows, 256])


@gluon.jit
def key_of_row(row):
    """Give the key of a row of scores."""
    return (row & -8) | ((row & 1) << 2) | (row >> 1 & 3)
