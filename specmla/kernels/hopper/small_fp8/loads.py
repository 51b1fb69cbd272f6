"""Partition of 1 warp: bulk copies of the codes, stage by stage, once a pass."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from specmla.kernels.gluon_api import expect, tma_load, view, wait
from specmla.kernels.hopper.layouts import BLOCK
from specmla.kernels.hopper.loads import fetch_to_cache, page_at, page_cell
from specmla.kernels.hopper.pieces import first_piece, read_piece
from specmla.kernels.hopper.small.passes import next_pass
from specmla.kernels.hopper.small_fp8.layouts import CODES_3D, PARTS, STAGES, WIDTH


@gluon.jit
def load_partition(
    cache, walk, codes, full, free, start, H: gl.constexpr, G: gl.constexpr, N: gl.constexpr
):
    """Bring the stages in: the codes of 64 keys, by copies of 128 columns."""
    LINES: gl.constexpr = 64 if G % 64 == 0 else G
    SLICES: gl.constexpr = 64 // LINES
    descriptor, block_table_ptr, stride_table, merge_ptr = cache
    queries_asked, warm = start
    latents = view(codes[0], [STAGES * 4 * SLICES, 1, LINES, WIDTH], CODES_3D)
    ropes = view(codes[1], [STAGES * SLICES, 1, LINES, WIDTH], CODES_3D)
    fetch_to_cache(merge_ptr + gl.program_id(0) * 8)
    # The first copy of all would wait for its descriptor: a copy that nobody reads fetches it.
    expect(warm, LINES * WIDTH)
    tma_load(descriptor, [0, 0, 512], warm, ropes.index(0))
    # Idle programs wait too: nothing ends before the kernel before has ended.
    cuda.gdc_wait()
    at, more = first_piece(walk)
    if more:
        # Queries asked for behind the stages of every program's keys would arrive last of all.
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
            stage = it % STAGES
            phase = (it // STAGES & 1) ^ 1
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
            bar = full.index(stage)
            wait(free.index(stage), phase)
            expect(bar, PARTS * BLOCK * WIDTH)
            for i in gl.static_range(SLICES):
                for c in gl.static_range(4):
                    to = latents.index((stage * 4 + c) * SLICES + i)
                    tma_load(descriptor, [pages[i], row, c * WIDTH], bar, to)
                tma_load(descriptor, [pages[i], row, 512], bar, ropes.index(stage * SLICES + i))
        at, row0, more = next_pass(walk, at, (rows, keys, tile, end), row0, H, N)
