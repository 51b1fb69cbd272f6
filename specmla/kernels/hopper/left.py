"""Partition of 4 warps: first block of each pair, left half of the output, the LSE."""

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
from specmla.kernels.hopper.layouts import (
    BLOCK,
    FLOOR,
    HALF,
    LN_2,
    O_LAYOUT,
    P_LAYOUT,
    S_LAYOUT,
    S_ROWS,
)
from specmla.kernels.hopper.masks import hide_keys, read_limits
from specmla.kernels.hopper.pieces import first_piece, next_piece, read_piece
from specmla.kernels.hopper.softmax import fold, scale_rows, score, shrink_rows, weigh
from specmla.kernels.hopper.tiles import (
    clear_tail,
    put_half,
    read_half,
    read_rope,
    write_out,
    write_part,
)


@gluon.jit
def left_partition(
    attend,
    shared,
    H: gl.constexpr,
    RUN: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Scores and softmax of the first block of each pair, and the left half of the output."""
    target, query, tables, walk, scale_log2 = attend
    queries, keys_shared, exchange, full, free, signal = shared
    first_max_ready, weights_ready, queries_asked, queries_ready, sums_ready = signal
    out_ptr, lse_ptr, part_ptr, part_stat_ptr = target
    latent_ptr, rope_ptr, stride_latent_t, stride_latent_h, stride_rope_t, stride_rope_h = query
    q_left, _q_right, q_rope = queries
    k_left, _k_right, k_rope = keys_shared
    weights, maxima, sums = exchange
    cuda.gdc_wait()
    at, more = first_piece(walk)
    it = 0
    seconds = 0
    while more:
        first_row, rows, keys, _request, tile, end, slot = read_piece(walk, at, H, RUN)
        q = read_half(latent_ptr, stride_latent_t, stride_latent_h, first_row, rows, tile, 0, H)
        r = read_rope(rope_ptr, stride_rope_t, stride_rope_h, first_row, rows, tile, H)
        if at[3] == 0:
            arrive(queries_asked[0])
        limits = read_limits(tables, (first_row, rows, keys, tile), H, WINDOW, TREE)
        put_half(q_left.index(0), q)
        q_rope.index(0).store(r)
        fence_async_shared()
        arrive(queries_ready[0])
        prefix = keys - rows
        wait(queries_ready[1], at[3] & 1)

        row_max = gl.full([BLOCK], FLOOR, gl.float32, S_ROWS)
        row_sum = fold(gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT))
        acc = gl.zeros([BLOCK, HALF], gl.float32, O_LAYOUT)
        for b in range(at[2], end, 2):
            stage = it % 2
            s = score(queries, keys_shared, full, stage, it // 2 & 1, it >> 24)
            it += 1
            arrive(free[0].index(stage))
            s = hide_keys(s, b, prefix, limits, WINDOW, TREE)
            new_max = gl.maximum(row_max, gl.max(s, axis=1) * scale_log2)
            maxima.index(0).store(new_max)
            arrive(first_max_ready)
            p = weigh(s, new_max, scale_log2)
            p16 = p.to(k_left.dtype)
            weights.index(it >> 24).store(p16)
            fence_async_shared()
            arrive(weights_ready[0])
            shrink = gl.exp2(row_max - new_max)
            row_sum = scale_rows(row_sum, shrink) + fold(p)
            row_max = new_max
            if (b + 1) * BLOCK > keys:
                clear_tail(k_left, stage, keys - b * BLOCK, it >> 24)
            if b > at[2]:
                acc = shrink_rows(acc, shrink)
            operand = gl.convert_layout(p16, P_LAYOUT)
            acc = warpgroup_mma(operand, k_left.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[1].index(stage))
            if b + 1 < end:
                stage = it % 2
                it += 1
                wait(weights_ready[1], seconds & 1)
                seconds += 1
                new_max = maxima.index(1).load(S_ROWS)
                shrink = gl.exp2(row_max - new_max)
                row_sum = scale_rows(row_sum, shrink)
                row_max = new_max
                if (b + 2) * BLOCK > keys:
                    clear_tail(k_left, stage, keys - (b + 1) * BLOCK, it >> 24)
                acc = shrink_rows(acc, shrink)
                other = k_rope.index(stage)
                acc = warpgroup_mma(other, k_left.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                arrive(free[0].index(stage))
                arrive(free[1].index(stage))

        # The merge may be launched as soon as programs end; it waits for all of them itself.
        cuda.gdc_launch_dependents()
        total = gl.convert_layout(gl.sum(row_sum, axis=1), S_ROWS)
        sums.index(0).store(total)
        arrive(sums_ready[0])
        wait(sums_ready[1], at[3] & 1)
        total += sums.index(1).load(S_ROWS)
        first_row, rows, keys, _request, tile, end, slot = read_piece(walk, at, H, RUN)
        row = gl.arange(0, BLOCK, S_ROWS)
        if slot < 0:
            empty = total == 0.0
            safe = gl.where(empty, 1.0, total)
            lse = gl.where(empty, float("-inf"), (row_max + gl.log2(safe)) * LN_2)
            at_row = first_row * H + tile * BLOCK + row
            gl.store(lse_ptr + at_row, lse, mask=tile * BLOCK + row < rows * H)
            acc = scale_rows(acc, gl.where(empty, 0.0, 1.0 / safe))
            write_out(acc, out_ptr, q_left.index(0), first_row, rows, tile, 0, H)
        else:
            to = part_stat_ptr + slot * (2 * BLOCK) + row
            gl.store(to, row_max)
            gl.store(to + BLOCK, total)
            write_part(acc, part_ptr, slot, rows * H - tile * BLOCK, 0)
        at, more = next_piece(walk, at, H, RUN)
