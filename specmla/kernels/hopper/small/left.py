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
from specmla.kernels.hopper.layouts import BLOCK, FLOOR, HALF, LN_2
from specmla.kernels.hopper.pieces import first_piece, read_piece
from specmla.kernels.hopper.small.passes import next_pass
from specmla.kernels.hopper.small.softmax import (
    fold,
    hide_keys,
    largest_scores,
    put_sums,
    read_limits,
    scale_columns,
    scale_sums,
    score,
    total_sums,
    weigh,
)
from specmla.kernels.hopper.small.tiles import read_half, read_rope, write_out, write_part
from specmla.kernels.hopper.tiles import clear_tail, put_half


@gluon.jit
def left_partition(
    attend,
    shared,
    H: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    N: gl.constexpr,
):
    """Scores and softmax of the first block of each pair, and the left half of the output."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(0, S)
    target, query, tables, walk, scale_log2 = attend
    queries, keys_shared, exchange, full, free, signal = shared
    weights_ready, queries_asked, queries_ready, sums_ready = signal
    out_ptr, lse_ptr, part_ptr, part_stat_ptr = target
    latent_ptr, rope_ptr, stride_latent_t, stride_latent_h, stride_rope_t, stride_rope_h = query
    q_left, _q_right, q_rope = queries
    k_left, _k_right, _k_rope = keys_shared
    weights, maxima, sums, of_warps = exchange
    cuda.gdc_wait()
    at, more = first_piece(walk)
    row0 = at[3]
    it = 0
    seconds = 0
    turn = 0
    while more:
        first_row, rows, keys, _request, tile, end, slot = read_piece(walk, at, H, 0)
        base = tile * BLOCK + row0
        piece = (first_row, rows, base)
        q = read_half(latent_ptr, stride_latent_t, stride_latent_h, piece, 0, H, N)
        r = read_rope(rope_ptr, stride_rope_t, stride_rope_h, piece, H, N)
        if turn == 0:
            arrive(queries_asked[0])
        limits = read_limits(tables, (first_row, rows, keys, base), H, WINDOW, TREE, N)
        put_half(q_left.index(0), q)
        q_rope.index(0).store(r)
        fence_async_shared()
        arrive(queries_ready[0])
        prefix = keys - rows
        # Here, where the first keys are still to come.
        after, row_after, more = next_pass(walk, at, (rows, keys, tile, end), row0, H, N)
        wait(queries_ready[1], turn & 1)

        row_max = gl.full([N], FLOOR, gl.float32, ROWS)
        row_sum = fold(gl.zeros([BLOCK, N], gl.float32, S), N)
        acc = gl.zeros([HALF, N], gl.float32, S)
        for b in range(at[2], end, 2):
            stage = it % 2
            s = score(queries, keys_shared, full, stage, it // 2 & 1, it >> 24, N)
            it += 1
            arrive(free[0].index(stage))
            s = hide_keys(s, b, prefix, limits, WINDOW, TREE)
            new_max = gl.maximum(row_max, largest_scores(s, of_warps[0], N) * scale_log2)
            p = weigh(s, new_max, scale_log2)
            weights[0].index(it >> 24).permute((1, 0)).store(p.to(k_left.dtype))
            maxima.index(0).store(new_max)
            fence_async_shared()
            arrive(weights_ready[0])
            shrink = gl.exp2(row_max - new_max)
            row_max = new_max
            if (b + 1) * BLOCK > keys:
                clear_tail(k_left, stage, keys - b * BLOCK, it >> 24)
            if b > at[2]:
                acc = scale_columns(acc, shrink)
            p16 = weights[0].index(it >> 24).permute((1, 0))
            acc = warpgroup_mma(k_left.index(stage).permute((1, 0)), p16, acc, is_async=True)
            row_sum = scale_sums(row_sum, shrink) + fold(p, N)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[1].index(stage))
            if b + 1 < end:
                stage = it % 2
                it += 1
                wait(weights_ready[1], seconds & 1)
                seconds += 1
                new_max = maxima.index(1).load(ROWS)
                shrink = gl.exp2(row_max - new_max)
                row_sum = scale_sums(row_sum, shrink)
                row_max = new_max
                if (b + 2) * BLOCK > keys:
                    clear_tail(k_left, stage, keys - (b + 1) * BLOCK, it >> 24)
                acc = scale_columns(acc, shrink)
                p16 = weights[1].index(it >> 24).permute((1, 0))
                acc = warpgroup_mma(k_left.index(stage).permute((1, 0)), p16, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                arrive(free[1].index(stage))

        # The merge may be launched as soon as programs end; it waits for all of them itself.
        cuda.gdc_launch_dependents()
        put_sums(row_sum, sums, 0)
        arrive(sums_ready[0])
        live_rows = rows * H - tile * BLOCK
        row = row0 + gl.arange(0, N, ROWS)
        if slot >= 0:
            write_part(acc, part_ptr, slot, row0, live_rows, 0, N)
        wait(sums_ready[1], turn & 1)
        total = total_sums(sums, N)
        if slot < 0:
            empty = total == 0.0
            safe = gl.where(empty, 1.0, total)
            lse = gl.where(empty, float("-inf"), (row_max + gl.log2(safe)) * LN_2)
            at_row = lse_ptr + (first_row * H + tile * BLOCK)
            gl.store(at_row + row, lse, mask=row < live_rows)
            acc = scale_columns(acc, gl.where(empty, 0.0, 1.0 / safe))
            write_out(acc, out_ptr, q_left.index(0), piece, 0, H, N)
        else:
            to = part_stat_ptr + (slot * (2 * BLOCK) + row)
            gl.store(to, row_max, mask=row < live_rows)
            gl.store(to + BLOCK, total, mask=row < live_rows)
        at, row0 = after, row_after
        turn += 1
