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
from specmla.kernels.hopper.layouts import BLOCK, FLOOR, HALF
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
from specmla.kernels.hopper.small.tiles import read_half, write_out, write_part
from specmla.kernels.hopper.tiles import clear_tail, put_half


@gluon.jit
def right_partition(
    attend, shared, H: gl.constexpr, WINDOW: gl.constexpr, TREE: gl.constexpr, N: gl.constexpr
):
    """Scores and softmax of the second block of each pair, and the right half of the output."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(0, S)
    target, query, tables, walk, scale_log2 = attend
    queries, keys_shared, exchange, full, free, signal = shared
    weights_ready, queries_asked, queries_ready, sums_ready = signal
    out_ptr, _lse_ptr, part_ptr, _part_stat_ptr = target
    latent_ptr, _rope_ptr, stride_latent_t, stride_latent_h, _stride_rope_t, _stride_rope_h = query
    _q_left, q_right, _q_rope = queries
    k_left, k_right, _k_rope = keys_shared
    weights, maxima, sums, of_warps = exchange
    cuda.gdc_wait()
    at, more = first_piece(walk)
    row0 = at[3]
    it = 0
    firsts = 0
    turn = 0
    while more:
        first_row, rows, keys, _request, tile, end, slot = read_piece(walk, at, H, 0)
        base = tile * BLOCK + row0
        piece = (first_row, rows, base)
        q = read_half(latent_ptr, stride_latent_t, stride_latent_h, piece, 1, H, N)
        if turn == 0:
            arrive(queries_asked[1])
        limits = read_limits(tables, (first_row, rows, keys, base), H, WINDOW, TREE, N)
        put_half(q_right.index(0), q)
        fence_async_shared()
        arrive(queries_ready[1])
        prefix = keys - rows
        # Here, where the first keys are still to come.
        after, row_after, more = next_pass(walk, at, (rows, keys, tile, end), row0, H, N)
        wait(queries_ready[0], turn & 1)

        row_max = gl.full([N], FLOOR, gl.float32, ROWS)
        row_sum = fold(gl.zeros([BLOCK, N], gl.float32, S), N)
        acc = gl.zeros([HALF, N], gl.float32, S)
        for b in range(at[2], end - 1, 2):
            stage = it % 2
            other = (it + 1) % 2
            s = score(queries, keys_shared, full, other, (it + 1) // 2 & 1, it >> 24, N)
            arrive(free[0].index(other))
            it += 2
            wait(weights_ready[0], firsts & 1)
            firsts += 1
            first_max = maxima.index(0).load(ROWS)
            if b > at[2]:
                acc = scale_columns(acc, gl.exp2(row_max - first_max))
            p16 = weights[0].index(it >> 24).permute((1, 0))
            acc = warpgroup_mma(k_right.index(stage).permute((1, 0)), p16, acc, is_async=True)
            s = hide_keys(s, b + 1, prefix, limits, WINDOW, TREE)
            new_max = gl.maximum(first_max, largest_scores(s, of_warps[1], N) * scale_log2)
            p = weigh(s, new_max, scale_log2)
            shrink = gl.exp2(row_max - new_max)
            # Stored before the product is awaited, or the exponentials move behind the wait.
            weights[1].index(it >> 24).permute((1, 0)).store(p.to(k_left.dtype))
            maxima.index(1).store(new_max)
            fence_async_shared()
            arrive(weights_ready[1])
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[2].index(stage))
            if (b + 2) * BLOCK > keys:
                clear_tail(k_right, other, keys - (b + 1) * BLOCK, it >> 24)
            acc = scale_columns(acc, gl.exp2(first_max - new_max))
            p16 = weights[1].index(it >> 24).permute((1, 0))
            acc = warpgroup_mma(k_right.index(other).permute((1, 0)), p16, acc, is_async=True)
            row_sum = scale_sums(row_sum, shrink) + fold(p, N)
            row_max = new_max
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[2].index(other))
        if (end - at[2]) % 2 == 1:
            # A last block without a partner.
            stage = it % 2
            it += 1
            wait(weights_ready[0], firsts & 1)
            firsts += 1
            new_max = maxima.index(0).load(ROWS)
            shrink = gl.exp2(row_max - new_max)
            row_sum = scale_sums(row_sum, shrink)
            if end - 1 > at[2]:
                acc = scale_columns(acc, shrink)
            if end * BLOCK > keys:
                clear_tail(k_right, stage, keys - (end - 1) * BLOCK, it >> 24)
            p16 = weights[0].index(it >> 24).permute((1, 0))
            acc = warpgroup_mma(k_right.index(stage).permute((1, 0)), p16, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[2].index(stage))

        put_sums(row_sum, sums, 1)
        arrive(sums_ready[1])
        if slot >= 0:
            write_part(acc, part_ptr, slot, row0, rows * H - tile * BLOCK, 1, N)
        wait(sums_ready[0], turn & 1)
        total = total_sums(sums, N)
        if slot < 0:
            empty = total == 0.0
            acc = scale_columns(acc, gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total)))
            write_out(acc, out_ptr, q_right.index(0), piece, 1, H, N)
        at, row0 = after, row_after
        turn += 1
