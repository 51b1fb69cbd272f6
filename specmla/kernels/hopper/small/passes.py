"""The walk of a program over its pieces, those of more than N rows in several passes."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper.layouts import BLOCK
from specmla.kernels.hopper.pieces import next_piece, read_piece


@gluon.jit
def next_pass(walk, at, row, H: gl.constexpr, N: gl.constexpr):
    """Step past a pass, whose first row in its tile is `row`; gives whether there is a next one."""
    _first_row, rows, _keys, _request, tile, _end, _slot = read_piece(walk, at, H, 0)
    again = row + N < gl.minimum(rows * H - tile * BLOCK, BLOCK)
    after, more = next_piece(walk, at, H, 0)
    at = (
        gl.where(again, at[0], after[0]),
        gl.where(again, at[1], after[1]),
        gl.where(again, at[2], after[2]),
        gl.where(again, at[3], after[3]),
    )
    return at, gl.where(again, row + N, 0), again | more
