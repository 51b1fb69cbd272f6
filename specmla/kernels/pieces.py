"""The device-side plan of the Triton kernels: which program attends which tile over which keys.

A tile's keys are cut into *pieces* of equal runs of whole steps. All tiles of a request get the
same cuts, side by side in launch order, so that they stream the same pages at the same time. One
program writes a record a piece and a record a tile that was cut, and marks the programs left over.
Everything is computed from device tensors: a captured plan follows the lengths of its replay.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.launch import FP_FUSION, next_power_of_2
from specmla.kernels.plan import (
    LEAST_RUN,
    PIECE_FIELDS,
    PIECE_STEPS,
    PiecePlan,
    lane_options,
    max_waves,
    num_resident,
)

FIELDS = tl.constexpr(PIECE_FIELDS)
"""Ints of a record. Of a piece: request (-1: nothing to do), tile, piece of the tile, steps of each
of its pieces, scratch slot (-1: write the result), first row, rows and keys of the request. Of a
cut tile: first slot, slot step, pieces, first packed row, rows; before those, their number and the
most pieces."""


@triton.jit
def even_cut(blocks, limit):
    """Give the pieces of requests of `blocks` steps in even runs of `limit` at most, and the runs.

    No piece is empty, but the only one of a request without keys.
    """
    run = tl.maximum(tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, limit), 1)), 1)
    return tl.maximum(tl.cdiv(blocks, run), 1), run


@triton.jit
def shortest_limits(blocks, tiles, targets, scratch_slots, LEAST_RUN: tl.constexpr):
    """Give for each of `targets` the shortest run that makes at most so many pieces, and at most
    `scratch_slots` of cut tiles; where none does, the longest request.
    """
    longest = tl.maximum(tl.max(blocks), LEAST_RUN)
    low = tl.zeros_like(targets) + LEAST_RUN
    high = tl.zeros_like(targets) + longest
    blocks, tiles = blocks[None, :], tiles[None, :]
    for _ in range(tl.sum(((longest >> tl.arange(0, 32)) > 0).to(tl.int32))):
        middle = (low + high) // 2
        pieces, _ = even_cut(blocks, middle[:, None])
        count = pieces * tiles
        fits = tl.sum(count, 1) <= targets
        fits = fits & (tl.sum(tl.where(pieces > 1, count, 0), 1) <= scratch_slots)
        low = tl.where(fits | (low == high), low, middle + 1)
        high = tl.where(fits, middle, high)
    return high


@triton.jit
def launch_order(count, run, CLASSES: tl.constexpr):
    """Give the first program of each request: long pieces start first, by classes of length."""
    rank = CLASSES - 1 - run * CLASSES // (tl.max(run) + 1)
    k = tl.arange(0, CLASSES)
    mine = rank[None, :] == k[:, None]
    held = tl.where(mine, count[None, :], 0)
    before = tl.cumsum(tl.sum(held, 1), 0) - tl.sum(held, 1)
    return tl.sum(tl.where(mine, tl.cumsum(held, 1) + before[:, None], 0), 0) - count


@triton.jit
def balanced_limit(
    blocks,
    tiles,
    max_waves,
    scratch_slots,
    RESIDENT: tl.constexpr,
    FIXED: tl.constexpr,
    LEAST_RUN: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Choose the longest run of a piece: the one choice between even pieces and a full device.

    Counts waves of RESIDENT programs in launch order, each as long as its longest piece plus FIXED:
    for tiles left whole, and for the shortest runs that fill as many waves as those need, one more,
    two more. Takes the cheapest; ties go to fewer pieces.
    """
    i = tl.arange(0, 4)
    waves = tl.maximum(tl.cdiv(tl.sum(tiles), RESIDENT), 1) + i - 1
    targets = tl.where((i > 0) & (i <= max_waves), waves * RESIDENT, -1)
    limits = shortest_limits(blocks, tiles, targets, scratch_slots, LEAST_RUN)
    best, least_cost = LEAST_RUN, 2147483647
    for k in range(4):
        limit = tl.sum(tl.where(i == k, limits, 0))
        pieces, run = even_cut(blocks, limit)
        start = launch_order(pieces * tiles, run, CLASSES)
        begun = tl.cdiv(start + pieces * tiles, RESIDENT) - tl.cdiv(start, RESIDENT)
        cost = tl.sum(begun * (run + FIXED))
        best = tl.where(cost < least_cost, limit, best)
        least_cost = tl.minimum(cost, least_cost)
    return best


@triton.jit
def write_records(
    piece_ptr,
    merge_ptr,
    requests,
    start,
    pieces,
    run,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the records of all pieces and of all cut tiles; `run` is in steps."""
    tiles, first_row, num_rows, num_keys = requests
    cut_tiles = tl.where(pieces > 1, tiles, 0)
    first_slot = tl.cumsum(cut_tiles * pieces, 0) - cut_tiles * pieces
    first_merge = tl.cumsum(cut_tiles, 0) - cut_tiles + 1
    tl.store(merge_ptr, tl.sum(cut_tiles))
    tl.store(merge_ptr + 1, tl.max(tl.where(tiles > 0, pieces, 1)))
    # Expanded before the loop: see NOTES.md, "Compilers".
    request, wide = tl.arange(0, start.shape[0])[:, None], tl.maximum(tiles, 1)[:, None]
    count, cut, slot = (tiles * pieces)[:, None], cut_tiles[:, None], first_slot[:, None]
    piece_at = piece_ptr + (start * FIELDS)[:, None]
    merge_at = merge_ptr + (first_merge * FIELDS)[:, None]
    parts, run, row = pieces[:, None], run[:, None], first_row[:, None]
    rows, keys = num_rows[:, None], num_keys[:, None]
    for begin in range(0, tl.max(tiles * pieces), WIDTH):
        i = begin + tl.arange(0, WIDTH)[None, :]
        keep, tile, piece = i < count, i % wide, i // wide
        to = piece_at + i * FIELDS
        tl.store(to, request + i * 0, mask=keep)
        tl.store(to + 1, tile, mask=keep)
        tl.store(to + 2, piece, mask=keep)
        tl.store(to + 3, run + i * 0, mask=keep)
        tl.store(to + 4, tl.where(cut > 0, slot + i, -1), mask=keep)
        tl.store(to + 5, row + i * 0, mask=keep)
        tl.store(to + 6, rows + i * 0, mask=keep)
        tl.store(to + 7, keys + i * 0, mask=keep)
        listed = i < cut  # the first piece of each tile that was cut
        to = merge_at + i * FIELDS
        tl.store(to, slot + i, mask=listed)
        tl.store(to + 1, wide + i * 0, mask=listed)
        tl.store(to + 2, parts + i * 0, mask=listed)
        tl.store(to + 3, row * H + i * BLOCK_M, mask=listed)
        tl.store(to + 4, tl.minimum(rows * H - i * BLOCK_M, BLOCK_M), mask=listed)


@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "num_programs", "scratch_slots", "max_waves"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr"],
)
def pieces_kernel(
    query_start_ptr,  # [B + 1] int32, or None: one row a request
    seq_lens_ptr,  # [B] int32
    piece_ptr,  # [num_programs, FIELDS] int32, out
    merge_ptr,  # [1 + cut tiles, FIELDS] int32, out
    num_requests,
    num_rows,  # T: rows of no request become a last one without keys
    num_programs,
    scratch_slots,
    max_waves,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RESIDENT: tl.constexpr,  # programs that run at once
    FIXED: tl.constexpr,  # cost of a piece besides its steps
    LEAST_RUN: tl.constexpr,
    RUN: tl.constexpr,  # steps of every piece, 0: no such rule
    PIECES: tl.constexpr,  # pieces of every tile, 0: no such rule
    CLASSES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the piece and merge records of a step; one program runs it."""
    r = tl.arange(0, BLOCK_B)
    held = r < num_requests
    if query_start_ptr is None:
        first_row, last_row = tl.minimum(r, num_rows), tl.minimum(r + 1, num_rows)
    else:
        first_row = tl.load(query_start_ptr + r, mask=r <= num_requests, other=num_rows)
        last_row = tl.load(query_start_ptr + r + 1, mask=held, other=num_rows)
    rows = tl.where(r <= num_requests, last_row - first_row, 0)
    num_keys = tl.maximum(tl.load(seq_lens_ptr + r, mask=held, other=0), 0)
    tiles = tl.cdiv(rows * H, BLOCK_M)
    blocks = tl.where(tiles > 0, tl.cdiv(num_keys, BLOCK_N), 0)

    if RUN > 0:
        pieces, run = tl.maximum(tl.cdiv(blocks, RUN), 1), tl.zeros_like(blocks) + RUN
    else:
        if PIECES > 0:
            limit = tl.maximum(tl.cdiv(blocks, PIECES), 1)
        else:
            limit = balanced_limit(
                blocks, tiles, max_waves, scratch_slots, RESIDENT, FIXED, LEAST_RUN, CLASSES
            )
        pieces, run = even_cut(blocks, limit)
    start = launch_order(pieces * tiles, tl.minimum(run, blocks), CLASSES)
    requests = (tiles, first_row, rows, num_keys)
    write_records(piece_ptr, merge_ptr, requests, start, pieces, run, H, BLOCK_M, WIDTH)
    for begin in range(tl.sum(pieces * tiles), num_programs, 1024):
        p = begin + tl.arange(0, 1024)
        tl.store(piece_ptr + p * FIELDS, -1, mask=p < num_programs)


PIECES = DirectKernel(pieces_kernel)


def fill_plan(plan: PiecePlan, query_start: Tensor | None, seq_lens: Tensor) -> None:
    """Write a plan's records for the live rows and lengths; nothing is read back.

    Args:
        plan: as reserved; filling it again replaces its records.
        query_start: [B + 1] int32, first row of each request, or None: one row a request.
        seq_lens: [B] int32.
    """
    shape, entry = plan.shape, plan.entry
    resident = num_resident(entry, seq_lens.device)
    PIECES.launch(
        (1,),
        query_start,
        seq_lens,
        plan.pieces,
        plan.merges,
        shape.requests,
        shape.rows,
        plan.bounds.programs,
        plan.bounds.slots,
        max_waves(plan.bounds.tiles, resident),
        H=shape.heads,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        RESIDENT=resident,
        FIXED=PIECE_STEPS,
        LEAST_RUN=LEAST_RUN,
        RUN=(plan.rule.piece_keys or 0) // entry.block_n,
        PIECES=plan.rule.num_splits or 0,
        **lane_options(next_power_of_2(shape.requests + 1)),
        enable_fp_fusion=FP_FUSION,
    )
