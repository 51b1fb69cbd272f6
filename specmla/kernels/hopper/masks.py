"""What the rows of a tile see: limits, and scores of unseen keys set to -inf."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper.layouts import ALL_ROWS, BLOCK, S_COLS, S_ROWS


@gluon.jit
def read_rows(
    tables,
    piece,
    layout: gl.constexpr,
    H: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Read what each row of a tile sees: extent, first key, word of bits."""
    row_extent_ptr, row_start_ptr, tree_bits_ptr = tables
    first_row, rows, keys, tile = piece
    row = tile * BLOCK + gl.arange(0, BLOCK, layout)
    alive = row < rows * H
    t = first_row + row // H
    extent = gl.minimum(gl.load(row_extent_ptr + t, mask=alive, other=keys), keys)
    first_key = extent
    word = extent.to(gl.int64)
    if WINDOW:
        first_key = gl.load(row_start_ptr + t, mask=alive, other=0)
    if TREE:
        word = gl.load(tree_bits_ptr + t, mask=alive, other=-1)
    return extent, first_key, word


@gluon.jit
def read_limits(tables, piece, H: gl.constexpr, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Read the rows' limits, and the range of keys that all rows see whatever their bits are."""
    _first_row, rows, keys, _tile = piece
    extent, first_key, word = read_rows(tables, piece, S_ROWS, H, WINDOW, TREE)
    # Reduced in a layout that every warp holds whole: over several warps it costs registers.
    all_extents, all_starts, _ = read_rows(tables, piece, ALL_ROWS, H, WINDOW, False)
    safe_end = gl.min(all_extents, axis=0)
    safe_begin = 0
    if WINDOW:
        safe_begin = gl.max(all_starts, axis=0)
    if TREE:
        safe_end = gl.minimum(safe_end, keys - rows)
    return extent, first_key, word, safe_begin, safe_end


@gluon.jit
def hide_keys(s, b, prefix, limits, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Set the scores of unseen keys of block `b` to -inf, where there are any."""
    extent, first_key, word, safe_begin, safe_end = limits
    if ((b + 1) * BLOCK > safe_end) | (b * BLOCK < safe_begin):
        key = b * BLOCK + gl.arange(0, BLOCK, S_COLS)
        seen = key[None, :] < extent[:, None]
        if WINDOW:
            seen = seen & (key[None, :] >= first_key[:, None])
        if TREE:
            node = gl.minimum(gl.maximum(key - prefix, 0), 63).to(gl.int64)
            bit = (word[:, None] >> node[None, :]) & 1
            seen = seen & ((key < prefix)[None, :] | (bit != 0))
        s = gl.where(seen, s, float("-inf"))
    return s
