"""Partition of 4 warps: scores, softmax and the left half of the output."""

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

from specmla.kernels.gluon_api import arrive, barrier, wait
from specmla.kernels.hopper.layouts import (
    BLOCK,
    FIELDS,
    FLOOR,
    HALF,
    LN_2,
    O_LAYOUT,
    O_ROWS,
    P_LAYOUT,
    S_COLS,
    S_LAYOUT,
    S_ROWS,
    clear_tail,
    read_half,
    read_rope,
    write_out,
    write_part,
)
from specmla.kernels.hopper.pieces import is_before, next_piece, piece_end, slot_of, tile_of


@gluon.jit
def read_limits(tables, t, alive, rows, keys, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Read extent, first key and word of each row, and the range of keys that all rows see."""
    row_extent_ptr, row_start_ptr, tree_bits_ptr = tables
    extent = gl.load(row_extent_ptr + t, mask=alive, other=keys)
    extent = gl.minimum(extent, keys)
    safe_end = gl.min(extent, axis=0)
    safe_begin = 0
    first_key = extent
    word = extent.to(gl.int64)
    if WINDOW:
        first_key = gl.load(row_start_ptr + t, mask=alive, other=0)
        safe_begin = gl.max(first_key, axis=0)
    if TREE:
        word = gl.load(tree_bits_ptr + t, mask=alive, other=-1)
        safe_end = gl.minimum(safe_end, keys - rows)
    return extent, first_key, word, (safe_begin, safe_end)


@gluon.jit
def hide_keys(s, b, prefix, limits, safe, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Set the scores of unseen keys of block `b` to -inf, where there are any."""
    extent, first_key, word = limits
    safe_begin, safe_end = safe
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


@gluon.jit
def score(queries, keys, full, stage, phase):
    """Scores [64, 64] of a stage, each part as soon as it has landed."""
    q_left, q_right, q_rope = queries
    k_left, k_right, k_rope = keys
    s = gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT)
    wait(full[0].index(stage), phase)
    k = k_rope.index(stage).permute((1, 0))
    s = warpgroup_mma(q_rope, k, s, use_acc=False, is_async=True)
    wait(full[1].index(stage), phase)
    s = warpgroup_mma(q_left, k_left.index(stage).permute((1, 0)), s, is_async=True)
    wait(full[2].index(stage), phase)
    s = warpgroup_mma(q_right, k_right.index(stage).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def score_partition(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    q_latent_ptr,
    q_rope_ptr,
    row_extent_ptr,
    row_start_ptr,
    tree_bits_ptr,
    program_ptr,
    entry_ptr,
    scale_log2,
    stride_latent_t,
    stride_latent_h,
    stride_rope_t,
    stride_rope_h,
    q_left,
    q_right,
    q_rope,
    k_left,
    k_right,
    k_rope,
    weights,
    factors,
    full,
    free,
    signal,
    H: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Scores, softmax and the left half of the output."""
    record = program_ptr + gl.program_id(0) * FIELDS
    entry, job, block = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    stop_entry, stop_job, stop_block = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
    lane, width = gl.load(record + 6), gl.load(record + 7)
    first_row, rows, keys = gl.load(record + 8), gl.load(record + 9), gl.load(record + 10)
    more = gl.load(record + 13) > 0
    it = 0
    message = 0
    piece = 0
    while more:
        end = piece_end(entry, job, stop_entry, stop_job, stop_block, keys)
        tile = tile_of(rows, job, width, lane, H)
        slot = slot_of(block, end, keys, gl.where(piece > 0, 1, 0))
        at = tile * BLOCK + gl.arange(0, BLOCK, S_ROWS)
        alive = at < rows * H
        t = first_row + at // H
        extent, first_key, word, safe = read_limits(
            (row_extent_ptr, row_start_ptr, tree_bits_ptr), t, alive, rows, keys, WINDOW, TREE
        )

        read_half(
            q_latent_ptr, stride_latent_t, stride_latent_h, first_row, rows, tile, 0, q_left, H
        )
        read_rope(q_rope_ptr, stride_rope_t, stride_rope_h, first_row, rows, tile, q_rope, H)
        fence_async_shared()
        barrier()
        wait(signal[2], piece & 1)

        row_max = gl.full([BLOCK], FLOOR, gl.float32, S_ROWS)
        row_sum = gl.full([BLOCK], 0.0, gl.float32, S_ROWS)
        acc = gl.zeros([BLOCK, HALF], gl.float32, O_LAYOUT)
        for b in range(block, end):
            stage = it % 2
            phase = it // 2 & 1
            s = score((q_left, q_right, q_rope), (k_left, k_right, k_rope), full, stage, phase)
            arrive(free[0].index(stage))

            s = hide_keys(s, b, keys - rows, (extent, first_key, word), safe, WINDOW, TREE)
            new_max = gl.maximum(row_max, gl.max(s, axis=1) * scale_log2)
            shrink = gl.exp2(row_max - new_max)
            row_max = new_max
            p = gl.exp2(gl.fma(s, gl.full_like(s, scale_log2), -new_max[:, None]))
            p16 = p.to(k_left.dtype)
            row_sum = row_sum * shrink + gl.sum(p, axis=1)
            wait(signal[1], (message & 1) ^ 1)
            weights.store(p16)
            factors.store(shrink)
            fence_async_shared()
            arrive(signal[0])
            message += 1
            if (b + 1) * BLOCK > keys:
                clear_tail(k_left.index(stage), keys - b * BLOCK)
            acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
            p_op = gl.convert_layout(p16, P_LAYOUT)
            acc = warpgroup_mma(p_op, k_left.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(free[1].index(stage))
            it += 1

        empty = row_sum == 0.0
        total = gl.where(empty, 1.0, row_sum)
        inverse = gl.where(empty, 0.0, 1.0 / total)
        lse = row_max + gl.log2(total)
        lse = gl.where(empty, float("-inf"), lse)
        wait(signal[1], (message & 1) ^ 1)
        factors.store(inverse)
        arrive(signal[0])
        message += 1
        if slot < 0:
            gl.store(lse_ptr + first_row * H + at, lse * LN_2, mask=alive)
        else:
            gl.store(part_lse_ptr + slot * BLOCK + gl.arange(0, BLOCK, S_ROWS), lse)
        acc = acc * gl.convert_layout(inverse, O_ROWS)[:, None]
        if slot < 0:
            write_out(acc, out_ptr, q_left, first_row, rows, tile, 0, H)
        else:
            write_part(acc, part_ptr, slot, rows * H - tile * BLOCK, 0)

        entry, job, block = next_piece(entry, job, end, width, rows, keys, H)
        more = is_before(entry, job, block, stop_entry, stop_job, stop_block)
        source = entry_ptr + entry * 8
        first_row, rows, keys = gl.load(source), gl.load(source + 1), gl.load(source + 2)
        piece += 1
