"""Partition of 1 warp: bulk copies of the cache pages, stage by stage."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.gluon_api import expect, tma_load, view, wait
from specmla.kernels.hopper.layouts import (
    BLOCK,
    COPY,
    FIELDS,
)
from specmla.kernels.hopper.pieces import is_before, next_piece, piece_end


@gluon.jit
def page_at(table, key, keys, G: gl.constexpr):
    """Page of a key; past the end the page of the block's first key, whose cell is always real."""
    return gl.load(table + gl.where(key < keys, key, key // BLOCK * BLOCK) // G)


@gluon.jit
def load_partition(
    descriptor,
    block_table_ptr,
    stride_table,
    program_ptr,
    entry_ptr,
    k_left,
    k_right,
    k_rope,
    full,
    free,
    H: gl.constexpr,
    G: gl.constexpr,
):
    """Bring the stages in: rope, left and right part of 64 keys, by copies of 64 columns."""
    LINES: gl.constexpr = 64 if G % 64 == 0 else G
    SLICES: gl.constexpr = 64 // LINES
    record = program_ptr + gl.program_id(0) * FIELDS
    entry, job, block = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    stop_entry, stop_job, stop_block = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
    width = gl.load(record + 7)
    rows, keys, request = gl.load(record + 9), gl.load(record + 10), gl.load(record + 11)
    more = gl.load(record + 13) > 0
    left = view(k_left, [8 * SLICES, 1, LINES, 64], COPY)
    right = view(k_right, [8 * SLICES, 1, LINES, 64], COPY)
    rope = view(k_rope, [2 * SLICES, 1, LINES, 64], COPY)
    it = 0
    while more:
        end = piece_end(entry, job, stop_entry, stop_job, stop_block, keys)
        table = block_table_ptr + request.to(gl.int64) * stride_table
        for b in range(block, end):
            stage = it % 2
            phase = (it // 2 & 1) ^ 1
            row = b * BLOCK % G
            page0 = page_at(table, b * BLOCK, keys, G)
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
            expect(full[0].index(stage), 64 * 64 * 2)
            for i in gl.static_range(SLICES):
                tma_load(
                    descriptor,
                    [pages[i], row, 512],
                    full[0].index(stage),
                    rope.index(stage * SLICES + i),
                )
            wait(free[1].index(stage), phase)
            expect(full[1].index(stage), 64 * 256 * 2)
            for c in gl.static_range(4):
                for i in gl.static_range(SLICES):
                    tma_load(
                        descriptor,
                        [pages[i], row, c * 64],
                        full[1].index(stage),
                        left.index((stage * 4 + c) * SLICES + i),
                    )
            wait(free[2].index(stage), phase)
            expect(full[2].index(stage), 64 * 256 * 2)
            for c in gl.static_range(4):
                for i in gl.static_range(SLICES):
                    tma_load(
                        descriptor,
                        [pages[i], row, 256 + c * 64],
                        full[2].index(stage),
                        right.index((stage * 4 + c) * SLICES + i),
                    )
            it += 1
        entry, job, block = next_piece(entry, job, end, width, rows, keys, H)
        more = is_before(entry, job, block, stop_entry, stop_job, stop_block)
        source = entry_ptr + entry * 8
        rows, keys, request = gl.load(source + 1), gl.load(source + 2), gl.load(source + 3)
