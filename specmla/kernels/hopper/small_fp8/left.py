"""Partition of 4 warps: first block of each pair, left half of the output, the LSE."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from specmla.kernels.gluon_api import arrive, wait
from specmla.kernels.hopper.layouts import BLOCK, FLOOR, HALF, LN_2
from specmla.kernels.hopper.pieces import first_piece, read_piece
from specmla.kernels.hopper.small.passes import next_pass
from specmla.kernels.hopper.small.softmax import (
    fold,
    put_sums,
    read_limits,
    scale_columns,
    scale_sums,
    total_sums,
)
from specmla.kernels.hopper.small.tiles import read_half, read_rope
from specmla.kernels.hopper.small_fp8.layouts import STAGES
from specmla.kernels.hopper.small_fp8.softmax import (
    QUERY,
    hide_keys,
    largest_of,
    largest_scores,
    power_down,
    power_up,
    put_scaled,
    row_power,
    score,
    weigh,
)
from specmla.kernels.hopper.small_fp8.tiles import (
    add_values,
    clear_tail,
    read_values,
    write_out,
    write_part,
)


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
    target, query, tables, walk, scales = attend
    queries, codes, exchange, full, free, signal = shared
    weights_ready, queries_asked, largest_ready, queries_ready, sums_ready = signal
    out_ptr, lse_ptr, part_ptr, part_stat_ptr = target
    latent_ptr, rope_ptr, stride_latent_t, stride_latent_h, stride_rope_t, stride_rope_h = query
    q_halves, q_rope = queries
    latents, _ropes = codes
    weights, maxima, of_warps = exchange
    scale_log2, sum_scale, max_shift = scales
    cuda.gdc_wait()
    at, more = first_piece(walk)
    row0 = at[3]
    it = 0
    pair = 0
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
        top = largest_of(r)
        for c in gl.static_range(4):
            top = gl.maximum(top, largest_of(q[c]))
        maxima.index(0).store(top)
        arrive(largest_ready[0])
        wait(largest_ready[1], turn & 1)
        down = power_down(row_power(maxima, QUERY))
        scale = power_up(row_power(maxima, ROWS)) * scale_log2
        for c in gl.static_range(4):
            put_scaled(q_halves.index(0), q[c], down, c)
        put_scaled(q_rope.index(0), r, down, 0)
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
            stage = it % STAGES
            wait(full.index(stage), it // STAGES & 1)
            s = score(queries, codes, stage, it >> 24, N)
            s = hide_keys(s, b, prefix, limits, WINDOW, TREE)
            new_max = gl.maximum(row_max, largest_scores(s, of_warps, 0, N) * scale)
            p = weigh(s, new_max, scale)
            weights.index(pair & 1).permute((1, 0)).store(p.to(gl.float16))
            maxima.index(pair & 1).store(new_max)
            fence_async_shared()
            arrive(weights_ready[0])
            own_max = new_max
            row_sum = scale_sums(row_sum, gl.exp2(row_max - own_max)) + fold(p, N)
            for j in range(it >> 24, gl.minimum(end - b, 2)):
                stage = it % STAGES
                source = pair & 1
                if j > 0:
                    source = 2
                    wait(full.index(stage), it // STAGES & 1)
                    wait(weights_ready[1], seconds & 1)
                    seconds += 1
                new_max = maxima.index(source).load(ROWS)
                if (b + j + 1) * BLOCK > keys:
                    clear_tail(latents, stage, 0, keys - (b + j) * BLOCK, it >> 24)
                v = read_values(latents, stage, 0, 0, N)
                acc = scale_columns(acc, gl.exp2(row_max - new_max))
                row_max = new_max
                acc = add_values(acc, v, weights.index(source), latents, free, stage, 0, N)
                acc = warpgroup_mma_wait(0, deps=[acc])
                it += 1
            row_sum = scale_sums(row_sum, gl.exp2(own_max - row_max))
            pair += 1

        # The merge may be launched as soon as programs end; it waits for all of them itself.
        cuda.gdc_launch_dependents()
        put_sums(row_sum, of_warps, 0)
        arrive(sums_ready[0])
        live_rows = rows * H - tile * BLOCK
        row = row0 + gl.arange(0, N, ROWS)
        if slot >= 0:
            write_part(acc, part_ptr, slot, row0, live_rows, 0, N)
        wait(sums_ready[1], turn & 1)
        total = total_sums(of_warps, N) * sum_scale
        row_max += max_shift
        if slot < 0:
            empty = total == 0.0
            safe = gl.where(empty, 1.0, total)
            lse = gl.where(empty, float("-inf"), (row_max + gl.log2(safe)) * LN_2)
            at_row = lse_ptr + (first_row * H + tile * BLOCK)
            gl.store(at_row + row, lse, mask=row < live_rows)
            acc = scale_columns(acc, gl.where(empty, 0.0, 1.0 / safe))
            write_out(acc, out_ptr, piece, 0, H, N)
        else:
            to = part_stat_ptr + (slot * (2 * BLOCK) + row)
            gl.store(to, row_max, mask=row < live_rows)
            gl.store(to + BLOCK, total, mask=row < live_rows)
        at, row0 = after, row_after
        turn += 1
