"""Partition of 4 warps: second block of each pair, right half of the output."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from specmla.kernels.gluon_api import arrive, wait
from specmla.kernels.hopper.layouts import BLOCK, FLOOR, HALF, O_LAYOUT, P_LAYOUT, S_LAYOUT, S_ROWS
from specmla.kernels.hopper.masks import hide_keys, read_limits
from specmla.kernels.hopper.pieces import first_piece, next_piece, read_piece
from specmla.kernels.hopper.softmax import fold, scale_rows, score, shrink_rows, weigh
from specmla.kernels.hopper.tiles import clear_tail, put_half, read_half, write_out, write_part


@gluon.jit
def right_partition(
    attend,
    shared,
    H: gl.constexpr,
    RUN: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Scores and softmax of the second block of each pair, and the right half of the output."""
    target, query, tables, walk, scale_log2 = attend
    queries, keys_shared, exchange, full, free, signal = shared
    first_max_ready, weights_ready, queries_asked, queries_ready, sums_ready = signal
    out_ptr, _lse_ptr, part_ptr, _part_stat_ptr = target
    latent_ptr, _rope_ptr, stride_latent_t, stride_latent_h, _stride_rope_t, _stride_rope_h = query
    _q_left, q_right, _q_rope = queries
    k_left, k_right, k_rope = keys_shared
    weights, maxima, sums = exchange
    cuda.gdc_wait()
    at, more = first_piece(walk)
    it = 0
    firsts = 0
    while more:
        first_row, rows, keys, _request, tile, end, slot = read_piece(walk, at, H, RUN)
        q = read_half(latent_ptr, stride_latent_t, stride_latent_h, first_row, rows, tile, 1, H)
        if at[3] == 0:
            arrive(queries_asked[1])
        limits = read_limits(tables, (first_row, rows, keys, tile), H, WINDOW, TREE)
        put_half(q_right.index(0), q)
        fence_async_shared()
        arrive(queries_ready[1])
        prefix = keys - rows
        wait(queries_ready[0], at[3] & 1)

        row_max = gl.full([BLOCK], FLOOR, gl.float32, S_ROWS)
        row_sum = fold(gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT))
        acc = gl.zeros([BLOCK, HALF], gl.float32, O_LAYOUT)
        for b in range(at[2], end - 1, 2):
            stage = it % 2
            other = (it + 1) % 2
            s = score(queries, keys_shared, full, other, (it + 1) // 2 & 1, it >> 24)
            it += 2
            # Its own weights come before the product with the other block's: the left partition
            # waits for them, and its products are what frees the stages.
            wait(first_max_ready, firsts & 1)
            first_max = maxima.index(0).load(S_ROWS)
            s = hide_keys(s, b + 1, prefix, limits, WINDOW, TREE)
            new_max = gl.maximum(first_max, gl.max(s, axis=1) * scale_log2)
            p = weigh(s, new_max, scale_log2)
            p16 = p.to(k_left.dtype)
            # The rope part of this block has served and is as large as its weights.
            k_rope.index(other).store(p16)
            maxima.index(1).store(new_max)
            fence_async_shared()
            arrive(weights_ready[1])
            first_shrink = gl.exp2(row_max - first_max)
            shrink = gl.exp2(first_max - new_max)
            row_sum = scale_rows(row_sum, first_shrink * shrink) + fold(p)
            row_max = new_max
            if b > at[2]:
                acc = shrink_rows(acc, first_shrink)
            wait(weights_ready[0], firsts & 1)
            firsts += 1
            acc = warpgroup_mma(weights.index(it >> 24), k_right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[2].index(stage))
            if (b + 2) * BLOCK > keys:
                clear_tail(k_right, other, keys - (b + 1) * BLOCK, it >> 24)
            acc = shrink_rows(acc, shrink)
            operand = gl.convert_layout(p16, P_LAYOUT)
            acc = warpgroup_mma(operand, k_right.index(other), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[2].index(other))
        if (end - at[2]) % 2 == 1:
            # A last block without a partner.
            stage = it % 2
            it += 1
            wait(first_max_ready, firsts & 1)
            wait(weights_ready[0], firsts & 1)
            firsts += 1
            new_max = maxima.index(0).load(S_ROWS)
            shrink = gl.exp2(row_max - new_max)
            row_sum = scale_rows(row_sum, shrink)
            if end - 1 > at[2]:
                acc = shrink_rows(acc, shrink)
            if end * BLOCK > keys:
                clear_tail(k_right, stage, keys - (end - 1) * BLOCK, it >> 24)
            acc = warpgroup_mma(weights.index(it >> 24), k_right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[2].index(stage))

        total = gl.convert_layout(gl.sum(row_sum, axis=1), S_ROWS)
        sums.index(1).store(total)
        arrive(sums_ready[1])
        wait(sums_ready[0], at[3] & 1)
        total += sums.index(0).load(S_ROWS)
        first_row, rows, keys, _request, tile, end, slot = read_piece(walk, at, H, RUN)
        if slot < 0:
            empty = total == 0.0
            acc = scale_rows(acc, gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total)))
            write_out(acc, out_ptr, q_right.index(0), first_row, rows, tile, 1, H)
        else:
            write_part(acc, part_ptr, slot, rows * H - tile * BLOCK, 1)
        at, more = next_piece(walk, at, H, RUN)
