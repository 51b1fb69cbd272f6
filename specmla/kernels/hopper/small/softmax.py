"""Scores with keys along the first axis, the arithmetic of their softmax, and what rows see."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from specmla.kernels.gluon_api import barrier, view, wait
from specmla.kernels.hopper.layouts import BLOCK, PLAIN, TILE

OF_WARPS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""A row of N values a warp."""


@gluon.jit
def score(queries, keys, full, stage, phase, zero, N: gl.constexpr):
    """Scores [64 keys, N] of a stage, each 64 columns as soon as they have landed.

    `zero` is 0, which the compiler must not know; see the tile of 64 rows.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    k_left, k_right, k_rope = keys
    columns = (view(k_left, [8, BLOCK, 64], TILE), view(k_right, [8, BLOCK, 64], TILE))
    s = gl.zeros([BLOCK, N], gl.float32, layout)
    wait(full[8].index(stage), phase)
    q = queries[2].index(zero).permute((1, 0))
    s = warpgroup_mma(k_rope.index(stage), q, s, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        parts = view(queries[half], [4, N, 64], TILE)
        for c in gl.static_range(4):
            wait(full[half * 4 + c].index(stage), phase)
            q = parts.index(zero + c).permute((1, 0))
            s = warpgroup_mma(columns[half].index(stage * 4 + c), q, s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def largest_scores(s, buffer, N: gl.constexpr):
    """Largest scores [N] over the keys of a block; each of the 4 warps holds 16 keys.

    By hand through shared memory [1, 4, N]: one barrier, where a reduction takes two.
    """
    rows: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    buffer.index(0).store(gl.max(s.reshape([4, 16, N]), axis=1))
    barrier()
    of_warp = view(buffer, [4, N], PLAIN)
    found = gl.maximum(of_warp.index(0).load(rows), of_warp.index(1).load(rows))
    return gl.maximum(found, gl.maximum(of_warp.index(2).load(rows), of_warp.index(3).load(rows)))


@gluon.jit
def weigh(s, row_max, scale_log2):
    """Weights exp2(scaled scores - maximum) [64 keys, N] in float32."""
    return gl.exp2(gl.fma(s, gl.full_like(s, scale_log2), -row_max[None, :]))


@gluon.jit
def fold(p, N: gl.constexpr):
    """Add up the keys that a thread holds: [64, N] to [4 warps, 8 lanes, N], without talking."""
    return gl.sum(p.reshape([4, 2, 8, N]), axis=1)


@gluon.jit
def scale_sums(sums, factor):
    """Multiply folded sums [4, 8, N] by `factor` [N], whose layout differs in name only."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    return sums * gl.convert_layout(factor, layout, assert_trivial=True)[None, None, :]


@gluon.jit
def put_sums(row_sum, sums, side: gl.constexpr):
    """Publish a side's folded sums: each warp its own [N]."""
    sums.index(side).store(gl.sum(row_sum, axis=1))


@gluon.jit
def total_sums(sums, N: gl.constexpr):
    """Sums of weights [N] of both sides, added in one order by either."""
    rows: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    # Every warp holds all of them, each in the lanes that have its rows already.
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    of_warp = view(sums, [1, 8, N], OF_WARPS).index(0).load(layout)
    return gl.convert_layout(gl.sum(of_warp, axis=0), rows, assert_trivial=True)


@gluon.jit
def scale_columns(x, factor):
    """Multiply the columns of `x` [M, N] by `factor` [N], whose layout differs in name only."""
    layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[None, :]


@gluon.jit
def read_limits(
    tables, piece, H: gl.constexpr, WINDOW: gl.constexpr, TREE: gl.constexpr, N: gl.constexpr
):
    """Read what each row sees (extent, first key, bits) and the keys that all rows see.

    Rows past the request stand for its last one.
    """
    row_extent_ptr, row_start_ptr, tree_bits_ptr = tables
    first_row, rows, keys, base = piece
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row = gl.minimum(base + gl.arange(0, N, gl.SliceLayout(0, S)), rows * H - 1)
    t = first_row + row // H
    extent = gl.minimum(gl.load(row_extent_ptr + t), keys)
    first_key = extent
    word = extent.to(gl.int64)
    safe_begin = 0
    # Every warp holds all rows: the reductions stay within it.
    safe_end = gl.min(extent, axis=0)
    if WINDOW:
        first_key = gl.load(row_start_ptr + t)
        safe_begin = gl.max(first_key, axis=0)
    if TREE:
        word = gl.load(tree_bits_ptr + t)
        safe_end = gl.minimum(safe_end, keys - rows)
    return extent, first_key, word, safe_begin, safe_end


@gluon.jit
def hide_keys(s, b, prefix, limits, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Set the scores of unseen keys of block `b` to -inf, where there are any."""
    extent, first_key, word, safe_begin, safe_end = limits
    if ((b + 1) * BLOCK > safe_end) | (b * BLOCK < safe_begin):
        key = b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, s.type.layout))
        seen = key[:, None] < extent[None, :]
        if WINDOW:
            seen = seen & (key[:, None] >= first_key[None, :])
        if TREE:
            node = gl.minimum(gl.maximum(key - prefix, 0), 63).to(gl.int64)
            bit = (word[None, :] >> node[:, None]) & 1
            seen = seen & ((key < prefix)[:, None] | (bit != 0))
        s = gl.where(seen, s, float("-inf"))
    return s
