"""Partition of 1 warp: bulk copies of the cache pages, stage by stage, once a pass."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from specmla.kernels.gluon_api import expect, tma_load, view, wait
from specmla.kernels.hopper.layouts import BLOCK, COPY
from specmla.kernels.hopper.loads import fetch_to_cache, page_at, page_cell
from specmla.kernels.hopper.pieces import first_piece, read_piece
from specmla.kernels.hopper.small.passes import next_pass


@gluon.jit
def load_partition(
    cache, walk, keys_shared, full, free, start, H: gl.constexpr, G: gl.constexpr, N: gl.constexpr
):
    """Bring the stages in: rope, left and right part of 64 keys, by copies of 64 columns."""
    LINES: gl.constexpr = 64 if G % 64 == 0 else G
    SLICES: gl.constexpr = 64 // LINES
    descriptor, block_table_ptr, stride_table, merge_ptr = cache
    k_left, k_right, k_rope = keys_shared
    queries_asked, warm = start
    halves = (
        view(k_left, [8 * SLICES, 1, LINES, 64], COPY),
        view(k_right, [8 * SLICES, 1, LINES, 64], COPY),
    )
    rope = view(k_rope, [2 * SLICES, 1, LINES, 64], COPY)
    fetch_to_cache(merge_ptr + gl.program_id(0) * 8)
    # The first copy of all would wait for its descriptor: a copy that nobody reads fetches it.
    expect(warm, LINES * 64 * 2)
    tma_load(descriptor, [0, 0, 512], warm, rope.index(0))
    # Idle programs wait too: nothing ends before the kernel before has ended.
    cuda.gdc_wait()
    at, more = first_piece(walk)
    if more:
        # Queries asked for behind two stages of every program's keys would arrive last of all.
        wait(queries_asked[0], 0)
        wait(queries_asked[1], 0)
    wait(warm, 0)
    row0 = at[3]
    it = 0
    while more:
        _first_row, rows, keys, request, tile, end, _slot = read_piece(walk, at, H, 0)
        table = block_table_ptr + request.to(gl.int64) * stride_table
        # The record holds the pages of the first two blocks: a copy needn't wait for the table.
        record = walk[0] + gl.program_id(0) * 16
        ahead = gl.load(page_cell(record + 14, table, at[2], at[3], keys, G))
        next_block = gl.minimum(at[2] + 1, gl.maximum((keys - 1) // BLOCK, 0))
        later = gl.load(page_cell(record + 15, table, next_block, at[3], keys, G))
        for b in range(at[2], end):
            stage = it % 2
            phase = (it // 2 & 1) ^ 1
            it += 1
            row = b * BLOCK % G
            page0 = ahead
            ahead = later
            later = page_at(table, gl.minimum(b + 2, end - 1) * BLOCK, keys, G)
            page1 = page0
            page2 = page0
            page3 = page0
            if SLICES > 1:
                page1 = page_at(table, b * BLOCK + LINES, keys, G)
            if SLICES > 2:
                page2 = page_at(table, b * BLOCK + 2 * LINES, keys, G)
                page3 = page_at(table, b * BLOCK + 3 * LINES, keys, G)
            pages = (page0, page1, page2, page3)
            wait(free[0].index(stage), phase)
            expect(full[8].index(stage), 64 * 64 * 2)
            for i in gl.static_range(SLICES):
                to = rope.index(stage * SLICES + i)
                tma_load(descriptor, [pages[i], row, 512], full[8].index(stage), to)
            for half in gl.static_range(2):
                wait(free[1 + half].index(stage), phase)
                for c in gl.static_range(4):
                    bar = full[half * 4 + c].index(stage)
                    expect(bar, 64 * 64 * 2)
                    for i in gl.static_range(SLICES):
                        to = halves[half].index((stage * 4 + c) * SLICES + i)
                        tma_load(descriptor, [pages[i], row, half * 256 + c * 64], bar, to)
        at, row0, more = next_pass(walk, at, (rows, keys, tile, end), row0, H, N)
