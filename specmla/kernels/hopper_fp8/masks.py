"""What 32 rows see of transposed scores: ranges that all see, and unseen keys set to -inf."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper_fp8.layouts import BLOCK, COLUMNS, MMA, ROWS

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Every warp holds all rows: reductions stay within a warp."""


@gluon.jit
def rows_of(piece, layout: gl.constexpr, H: gl.constexpr):
    """Give the packed rows' indices in the step [32], and which of them are real."""
    first_row, rows, _keys, part = piece
    row = part * ROWS + gl.arange(0, ROWS, layout)
    return first_row + row // H, row < rows * H


@gluon.jit
def common_range(tables, piece, H: gl.constexpr, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Give the range of keys that all 32 rows see, whatever their bits are."""
    row_extent_ptr, row_start_ptr, _tree_bits_ptr = tables
    _first_row, rows, keys, _part = piece
    t, alive = rows_of(piece, LANES, H)
    extent = gl.minimum(gl.load(row_extent_ptr + t, mask=alive, other=keys), keys)
    end = gl.min(extent, axis=0)
    begin = 0
    if WINDOW:
        begin = gl.max(gl.load(row_start_ptr + t, mask=alive, other=0), axis=0)
    if TREE:
        end = gl.minimum(end, keys - rows)
    return begin, end


@gluon.jit
def hide_keys(s, b, tables, piece, H: gl.constexpr, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Set the scores [64 keys, 32 rows] of unseen keys of block `b` to -inf.

    The rows' limits are read anew: registers are scarcer than loads that few blocks need.
    """
    row_extent_ptr, row_start_ptr, tree_bits_ptr = tables
    _first_row, rows, keys, _part = piece
    t, alive = rows_of(piece, COLUMNS, H)
    extent = gl.minimum(gl.load(row_extent_ptr + t, mask=alive, other=keys), keys)
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, MMA))
    extent -= b * BLOCK
    seen = key[:, None] < extent[None, :]
    if WINDOW:
        first_key = gl.load(row_start_ptr + t, mask=alive, other=0)
        seen = seen & (key[:, None] >= (first_key - b * BLOCK)[None, :])
    if TREE:
        prefix = keys - rows - b * BLOCK
        word = gl.load(tree_bits_ptr + t, mask=alive, other=-1)
        node = gl.minimum(gl.maximum(key - prefix, 0), 63).to(gl.int64)
        bit = (word[None, :] >> node[:, None]) & 1
        seen = seen & ((key < prefix)[:, None] | (bit != 0))
    return gl.where(seen, s, float("-inf"))
