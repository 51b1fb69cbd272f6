"""Partition of 4 warps: the right half of the output, from the published weights."""

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

from specmla.kernels.gluon_api import arrive, wait
from specmla.kernels.hopper.layouts import (
    BLOCK,
    FIELDS,
    HALF,
    O_LAYOUT,
    O_ROWS,
    clear_tail,
    read_half,
    write_out,
    write_part,
)
from specmla.kernels.hopper.pieces import is_before, next_piece, piece_end, slot_of, tile_of


@gluon.jit
def value_partition(
    out_ptr,
    part_ptr,
    q_latent_ptr,
    program_ptr,
    entry_ptr,
    stride_latent_t,
    stride_latent_h,
    q_right,
    k_right,
    weights,
    factors,
    free,
    signal,
    H: gl.constexpr,
):
    """The right half of the output, from the published weights."""
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
        read_half(
            q_latent_ptr, stride_latent_t, stride_latent_h, first_row, rows, tile, 1, q_right, H
        )
        fence_async_shared()
        arrive(signal[2])
        acc = gl.zeros([BLOCK, HALF], gl.float32, O_LAYOUT)
        for b in range(block, end):
            stage = it % 2
            wait(signal[0], message & 1)
            acc = acc * factors.load(O_ROWS)[:, None]
            if (b + 1) * BLOCK > keys:
                clear_tail(k_right.index(stage), keys - b * BLOCK)
            acc = warpgroup_mma(weights, k_right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(signal[1])
            arrive(free[2].index(stage))
            message += 1
            it += 1
        wait(signal[0], message & 1)
        acc = acc * factors.load(O_ROWS)[:, None]
        arrive(signal[1])
        message += 1
        if slot < 0:
            write_out(acc, out_ptr, q_right, first_row, rows, tile, 1, H)
        else:
            write_part(acc, part_ptr, slot, rows * H - tile * BLOCK, 1)

        entry, job, block = next_piece(entry, job, end, width, rows, keys, H)
        more = is_before(entry, job, block, stop_entry, stop_job, stop_block)
        source = entry_ptr + entry * 8
        first_row, rows, keys = gl.load(source), gl.load(source + 1), gl.load(source + 2)
        piece += 1
