"""Partition of 4 warps: scores, softmax and output of 32 rows."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra import cuda

from specmla.kernels.gluon_api import arrive, barrier, wait
from specmla.kernels.hopper.pieces import first_piece, next_piece, read_piece
from specmla.kernels.hopper_fp8.convert import weight_order
from specmla.kernels.hopper_fp8.layouts import BLOCK, COLUMNS, FLOOR, MMA, ROWS, STAGES
from specmla.kernels.hopper_fp8.masks import common_range, hide_keys
from specmla.kernels.hopper_fp8.results import share_halves, write_results
from specmla.kernels.hopper_fp8.scores import add_values, fold, largest, scale_columns, score
from specmla.kernels.hopper_fp8.tiles import clear_tail, put_queries, read_queries

LAZY = gl.constexpr(True)
OWN_MAX = gl.constexpr(False)
MARGIN = gl.constexpr(8.0)


@gluon.jit
def read_part(walk, at, W: gl.constexpr, H: gl.constexpr, RUN: gl.constexpr):
    """Read a piece as partition `W` takes it: first row, rows, keys, which 32 packed rows.

    Also whether both partitions take the same rows, each every second block, and the end block.
    """
    first_row, rows, keys, _request, tile, end, _slot = read_piece(walk, at, H, RUN)
    both = (rows * H - tile * BLOCK <= ROWS) & (RUN == 0)
    part = 2 * tile + gl.where(both, 0, W)
    return (first_row, rows, keys, part), both, end


@gluon.jit
def attend_partition(
    attend,
    shared,
    W: gl.constexpr,
    H: gl.constexpr,
    RUN: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Attend the rows or the blocks that partition `W`, 0 or 1, has of each piece."""
    target, query, tables, walk, scale_log2, value_scale = attend
    queries, latents, ropes, weights, by_warp, exchange, full, free, queries_asked = shared
    cuda.gdc_wait()
    at, more = first_piece(walk)
    # Blocks before the piece; bit 24 turns with every piece that both partitions share.
    before = 0
    while more:
        piece, both, end = read_part(walk, at, W, H, RUN)
        first_row, rows, _keys, part = piece
        skip = gl.where(both, 1, 0)
        q = read_queries(query, first_row, rows, part, H)
        if at[3] == 0:
            arrive(queries_asked[W])
        begin, plain_end = common_range(tables, piece, H, WINDOW, TREE)
        # The other partition may still be reading what it got in their place.
        wait(exchange[3][W], (before >> 24 & 1) ^ 1)
        scale = put_queries(queries, q, W) * scale_log2
        fence_async_shared()
        barrier()

        row_max = gl.full([ROWS], FLOOR, gl.float32, COLUMNS)
        row_sum = fold(gl.zeros([BLOCK, ROWS], gl.float32, MMA))
        left = gl.zeros([256, ROWS], gl.float32, MMA)
        right = gl.zeros([256, ROWS], gl.float32, MMA)
        for b in range(at[2] + W * skip, end, 1 + skip):
            n = before + b - at[2]
            stage = n % STAGES
            wait(full.index(stage), n // STAGES & 1)
            s = score(queries, latents, ropes, stage, W, n >> 25)
            if ((b + 1) * BLOCK > plain_end) | (b * BLOCK < begin):
                # Read again: registers are scarcer than loads that few blocks need.
                piece, _both, _end = read_part(walk, at, W, H, RUN)
                s = hide_keys(s, b, tables, piece, H, WINDOW, TREE)
                if (b + 1) * BLOCK > piece[2]:
                    clear_tail(latents, stage, piece[2] - b * BLOCK)
            if OWN_MAX:
                new_max = gl.maximum(row_max, largest(s, by_warp.index(W)) * scale)
            else:
                new_max = gl.maximum(row_max, gl.max(s, axis=0) * scale)
            if LAZY:
                new_max = gl.where(new_max > row_max + MARGIN, new_max, row_max)
            shrink = gl.exp2(row_max - new_max)
            p = gl.exp2(gl.fma(s, scale[None, :], -new_max[None, :]))
            weights.index(W).store(weight_order(p.to(gl.float16)))
            fence_async_shared()
            if LAZY:
                if gl.max(new_max - row_max, axis=0) > 0.0:
                    row_sum = scale_columns(row_sum, shrink)
                    left = scale_columns(left, shrink)
                    right = scale_columns(right, shrink)
                row_sum += fold(p)
            else:
                row_sum = scale_columns(row_sum, shrink) + fold(p)
                left = scale_columns(left, shrink)
                right = scale_columns(right, shrink)
            row_max = new_max
            barrier()
            left, right = add_values(left, right, weights.index((n >> 25) + W), latents, stage)
            barrier()
            arrive(free.index(stage))
            arrive(free.index(stage), pred=both)
        before += end - at[2]

        # The merge may be launched as soon as programs end; it waits for all of them itself.
        if W == 0:
            cuda.gdc_launch_dependents()
        total = gl.sum(gl.sum(row_sum, axis=1), axis=0)
        total = gl.convert_layout(total, COLUMNS)
        if both:
            row_max, total, left, right = share_halves(
                exchange, queries[0], (row_max, total, left, right), before >> 24 & 1, W
            )
            before ^= 1 << 24
        place = read_piece(walk, at, H, RUN)
        write_results(target, place, (row_max, total, left, right), value_scale, W, H, RUN)
        at, more = next_piece(walk, at, H, RUN)
