"""Partition of 4 warps: brings the pages' codes in, block by block, and converts them."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from specmla.kernels.gluon_api import expect, retype, tma_load, wait
from specmla.kernels.hopper.layouts import BLOCK
from specmla.kernels.hopper.loads import fetch_to_cache, page_at, page_cell
from specmla.kernels.hopper.pieces import first_piece, next_piece, read_piece
from specmla.kernels.hopper_fp8.convert import GROUP, convert_block
from specmla.kernels.hopper_fp8.layouts import CODES_3D

PREFETCH = gl.constexpr(True)


@gluon.jit
def fetch_block(address, size: gl.constexpr):
    """Ask L2 for `size` bytes in a row, by one lane."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;"
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, gl.to_tensor(size)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_block(descriptor, keys_shared, barriers, it, row, pages, LINES: gl.constexpr):
    """Start the copies of block number `it`, 64 columns each: rope, then the others.

    They fill half the rope part of a stage and its right part, as soon as these are free.
    """
    SLICES: gl.constexpr = 64 // LINES
    raw, raw_rope, free_rope, free_right = barriers
    latents = retype(keys_shared[0], gl.uint8, [32 * SLICES, 1, LINES, 64], CODES_3D)
    rope = retype(keys_shared[1], gl.uint8, [4 * SLICES, 1, LINES, 64], CODES_3D)
    stage = it % 2
    phase = (it // 2 & 1) ^ 1
    bar = raw_rope.index(stage)
    wait(free_rope.index(stage), phase)
    expect(bar, 64 * 64)
    for i in gl.static_range(SLICES):
        to = rope.index(2 * stage * SLICES + i)
        tma_load(descriptor, [pages[i], row, 512], bar, to)
    wait(free_right.index(stage), phase)
    for c in range(it >> 24, 8, GROUP):
        bar = raw.index(stage * (8 // GROUP) + c // GROUP)
        expect(bar, GROUP * 64 * 64)
        for k in range(c, c + GROUP):
            for i in gl.static_range(SLICES):
                to = latents.index((16 + stage * 8 + k) * SLICES + i)
                tma_load(descriptor, [pages[i], row, k * 64], bar, to)


@gluon.jit
def bring_partition(
    cache,
    walk,
    keys_shared,
    barriers,
    start,
    H: gl.constexpr,
    G: gl.constexpr,
    RUN: gl.constexpr,
):
    """Bring in and convert the blocks of all pieces, two at a time.

    The second block's copies may start before the first is converted: what is in their place, the
    second block before, is let go by partitions that need nothing of this pair.
    """
    LINES: gl.constexpr = 64 if G % 64 == 0 else G
    descriptor, cache_ptr, stride_page, block_table_ptr, stride_table, merge_ptr = cache
    arriving, converting = barriers
    queries_asked, warm, scratch = start
    fetch_to_cache(merge_ptr + gl.program_id(0) * 8)
    # The first copy of all would wait for its descriptor: a copy that nobody reads fetches it.
    expect(warm, LINES * 64)
    unread = retype(scratch, gl.uint8, [128 // LINES, 1, LINES, 64], CODES_3D)
    tma_load(descriptor, [0, 0, 512], warm, unread.index(0))
    cuda.gdc_wait()
    at, more = first_piece(walk)
    if more:
        # Queries asked for behind the stages of every program's keys would arrive last of all.
        wait(queries_asked[0], 0)
        wait(queries_asked[1], 0)
    wait(warm, 0)
    it = 0
    while more:
        _first_row, _rows, keys, request, _tile, end, _slot = read_piece(walk, at, H, RUN)
        table = block_table_ptr + request.to(gl.int64) * stride_table
        # The record holds the pages of the first two blocks: a copy needn't wait for the table.
        record = walk[0] + gl.program_id(0) * 16
        first = gl.load(page_cell(record + 14, table, at[2], at[3], keys, G))
        next_block = gl.minimum(at[2] + 1, gl.maximum((keys - 1) // BLOCK, 0))
        second = gl.load(page_cell(record + 15, table, next_block, at[3], keys, G))
        for b in range(at[2], end, 2):
            count = gl.minimum(end - b, 2)
            for i in range(it >> 24, count):
                key = (b + i) * BLOCK
                page0 = gl.where(i == 0, first, second)
                page1, page2, page3 = page0, page0, page0
                if LINES < 64:
                    page1 = page_at(table, key + LINES, keys, G)
                if LINES < 32:
                    page2 = page_at(table, key + 2 * LINES, keys, G)
                    page3 = page_at(table, key + 3 * LINES, keys, G)
                pages = (page0, page1, page2, page3)
                copy_block(descriptor, keys_shared, arriving, it + i, key % G, pages, LINES)
            # The next pair's pages, looked up while this pair's copies are on their way.
            first = page_at(table, gl.minimum(b + 2, end - 1) * BLOCK, keys, G)
            second = page_at(table, gl.minimum(b + 3, end - 1) * BLOCK, keys, G)
            if PREFETCH and LINES == 64:
                for i in range(2, gl.minimum(end - b, 4)):
                    page = cache_ptr + gl.where(i == 2, first, second).to(gl.int64) * stride_page
                    fetch_block(page + (b + i) * BLOCK % G * 576, 64 * 576)
            for i in range(it >> 24, count):
                convert_block(keys_shared, converting, it + i)
            it += count
        at, more = next_piece(walk, at, H, RUN)
