"""Inline assembly: multiply the accumulators of a thread, unless no lane of the warp needs it.

Which lanes agree is not to be had in Gluon but by a reduction over the whole tile.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

SHRINK_PACK = gl.constexpr(64)
"""Values of a thread that one vote decides on: 32 columns of each of its two rows."""


def _instructions(count: int) -> str:
    """Give the text for `count` values x ($0 ...), tied to their results, and as many factors.

    An accumulator's values come in pairs of columns, of one row and of the row 8 below in turn, so
    that factors 0 and 2 are all that a thread has.
    """
    upper, lower = 2 * count, 2 * count + 2
    vote = (
        f"setp.neu.f32 mine, ${upper}, 0f3F800000; "
        f"setp.neu.or.f32 mine, ${lower}, 0f3F800000, mine; "
        "vote.sync.any.pred any, mine, 0xffffffff; @!any bra done;"
    )
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"{{ .reg .pred mine, any; {vote} {products} done: }}"


def _operands(count: int) -> str:
    """Give the constraints: results, the values in the same registers, the factors."""
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["f"] * count)


SHRINK = gl.constexpr(_instructions(SHRINK_PACK.value))
SHRINK_OPERANDS = gl.constexpr(_operands(SHRINK_PACK.value))
