"""Positions on the line of jobs that `schedule.py` cuts, and the list of the tiles it cut."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

TILE_ROWS = tl.constexpr(64)
BLOCK_KEYS = tl.constexpr(64)

SEARCH = tl.constexpr(32)
"""Entries compared at a time."""

PROGRAM_FIELDS = tl.constexpr(16)
"""Ints of a program's record: entry, job, block of its start; the same of its end; lane, width;
first row, rows, keys, request and slot base of the first entry; live; the pages of its first two
blocks, so that the first copy does not wait for the table."""

ENTRY_FIELDS = tl.constexpr(8)
"""Ints of an entry: first row, rows, keys, request, slot base, position, jobs, cost."""

MERGE_FIELDS = tl.constexpr(8)
"""Ints of a split tile: first slot, second slot, slot step, pieces, first packed row, live rows,
number of its first item, items (`merge_items`). Record 0 holds the counts of tiles and of items,
and whether these are wide."""

MERGE_PROGRAMS_PER_SM = tl.constexpr(4)
"""Programs of the merge that an SM holds at once: more items than that are made wide."""


@triton.jit
def split_position(at, cost, blocks, length, even, FIXED: tl.constexpr, RUN: tl.constexpr):
    """Turn a position on the line inside an entry into (job, block)."""
    job = at // cost
    rest = at - job * cost
    block = tl.where(even, (rest * blocks + cost - 1) // cost, tl.maximum(rest - FIXED, 0))
    if RUN > 0:
        block = block // RUN * RUN
    # Pieces of a block or two are not worth a program's fixed cost.
    snap = tl.where(even, 0, tl.minimum(length // 16, 2))
    block = tl.where(block <= snap, 0, block)
    to_next = (block > 0) & (blocks - block <= snap)
    return tl.where(to_next, job + 1, job), tl.where(to_next, 0, block)


@triton.jit
def line_length(load4, load2, load1, PROGRAMS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Shortest interval that needs at most PROGRAMS programs for the lines of all widths."""
    total = 4 * load4 + 2 * load2 + load1
    low = tl.maximum(tl.cdiv(total, PROGRAMS), MIN_BLOCKS)
    high = tl.maximum(total, low)
    while low < high:
        mid = (low + high) // 2
        need = 4 * tl.cdiv(load4, mid) + 2 * tl.cdiv(load2, mid) + tl.cdiv(load1, mid)
        fits = need <= PROGRAMS
        low = tl.where(fits, low, mid + 1)
        high = tl.where(fits, mid, high)
    return low


@triton.jit
def even_length(tiles, blocks, PROGRAMS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Shortest piece such that all jobs in equal pieces need at most PROGRAMS programs."""
    low = tl.maximum(tl.cdiv(tl.sum(tiles * blocks), PROGRAMS), MIN_BLOCKS)
    high = tl.maximum(tl.max(tl.where(tiles > 0, blocks, 0)), low)
    while low < high:
        mid = (low + high) // 2
        fits = tl.sum(tiles * tl.maximum(tl.cdiv(blocks, mid), 1)) <= PROGRAMS
        low = tl.where(fits, low, mid + 1)
        high = tl.where(fits, mid, high)
    return low


@triton.jit
def find_job(
    x,
    load,
    begin_entry,
    count,
    entry_ptr,
    mine,
    length,
    even,
    FIXED: tl.constexpr,
    RUN: tl.constexpr,
):
    """Find (entry, job, block) at positions `x` of a line; past its end, the entry after it."""
    entry = tl.zeros_like(x) + begin_entry - 1
    lane = tl.arange(0, SEARCH)
    for start in range(0, count, SEARCH):
        i = start + lane
        source = entry_ptr + (begin_entry + i) * ENTRY_FIELDS
        at = tl.load(source + 5, mask=i < count, other=2147483647)
        entry += tl.sum((at[None, :] <= x[:, None]).to(tl.int32), 1)
    inside = mine & (x < load)
    source = entry_ptr + entry * ENTRY_FIELDS
    keys = tl.load(source + 2, mask=inside, other=0)
    at = tl.load(source + 5, mask=inside, other=0)
    num_jobs = tl.load(source + 6, mask=inside, other=1)
    cost = tl.load(source + 7, mask=inside, other=1)
    blocks = (keys + BLOCK_KEYS - 1) // BLOCK_KEYS
    job, block = split_position(x - at, cost, blocks, length, even, FIXED, RUN)
    onward = job >= num_jobs
    entry = tl.where(onward, entry + 1, entry)
    job = tl.where(onward, 0, job)
    return (
        tl.where(inside, entry, begin_entry + count),
        tl.where(inside, job, 0),
        tl.where(inside, block, 0),
    )


@triton.jit
def merge_items(pieces, live_rows, RUN: tl.constexpr, WIDE: tl.constexpr = False):
    """Count the items that `merge.py` makes of a tile: groups of 8 rows x shares of the columns.

    Wide items of 9 to 16 pieces have twice the columns: half as many take less than twice as long.
    """
    groups = (live_rows + 7) // 8
    if RUN > 0:
        return groups * tl.where(pieces <= 4, 4, 8)
    few = tl.where(pieces <= 4, 4, tl.where((pieces <= 8) | WIDE, 8, 16))
    shares = tl.where(pieces <= 16, few, tl.where(pieces <= 32, 32, 64))
    return groups * shares


@triton.jit
def list_cut_jobs(
    merge_ptr, merges, entry_ptr, p, live, start, stop, pieces, width, lane, H: tl.constexpr
):
    """Append the tiles whose job starts in these programs and is cut at their end."""
    num_merges, num_items = merges
    start_e, start_k, start_b = start
    stop_e, stop_k, stop_b = stop
    first = (start_e == stop_e) & (start_k == stop_k)
    cut = live & (stop_b > 0) & ((start_b == 0) | (first == 0))
    index = num_merges + tl.cumsum(cut.to(tl.int32), 0) - 1
    source = entry_ptr + stop_e * ENTRY_FIELDS
    first_row = tl.load(source + 0, mask=cut, other=0)
    num_rows = tl.load(source + 1, mask=cut, other=0)
    tiles = (num_rows * H + TILE_ROWS - 1) // TILE_ROWS
    tile = first_tile(tiles, stop_k, width) + lane
    to = merge_ptr + (1 + index) * MERGE_FIELDS
    tl.store(to + 0, 2 * p + tl.where(first, 0, 1), mask=cut)
    tl.store(to + 1, 2 * (p + width), mask=cut)
    tl.store(to + 2, tl.zeros_like(p) + 2 * width, mask=cut)
    tl.store(to + 3, pieces, mask=cut)
    tl.store(to + 4, first_row * H + tile * TILE_ROWS, mask=cut)
    live_rows = tl.minimum(num_rows * H - tile * TILE_ROWS, TILE_ROWS)
    tl.store(to + 5, live_rows, mask=cut)
    items = tl.where(cut, merge_items(pieces, live_rows, 0), 0)
    tl.store(to + 6, num_items + tl.cumsum(items, 0) - items, mask=cut)
    tl.store(to + 7, items, mask=cut)
    return num_merges + tl.sum(cut.to(tl.int32)), num_items + tl.sum(items)


@triton.jit
def widen_items(merge_ptr, count):
    """Number the wide items of the listed tiles; gives how many there are."""
    lane = tl.arange(0, SEARCH)
    total = count * 0
    for start in range(0, count, SEARCH):
        to = merge_ptr + (1 + start + lane) * MERGE_FIELDS
        listed = start + lane < count
        pieces = tl.load(to + 3, mask=listed, other=0)
        live_rows = tl.load(to + 5, mask=listed, other=0)
        items = tl.where(listed, merge_items(pieces, live_rows, 0, True), 0)
        tl.store(to + 6, total + tl.cumsum(items, 0) - items, mask=listed)
        tl.store(to + 7, items, mask=listed)
        total += tl.sum(items)
    return total


@triton.jit
def first_tile(tiles, job, width):
    """Tile of lane 0 of a job: widths 4 first, then the low bits of the tile count."""
    return tl.where(width == 4, job * 4, tiles // (2 * width) * (2 * width))
