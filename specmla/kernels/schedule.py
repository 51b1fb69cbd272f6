"""The device-side split plan: which program attends which rows over which keys.

A *job* is 4, 2 or 1 neighbouring tiles of one request, attended by as many programs side by side (a
gang), so that the pages one of them fetches serve the others from L2. A request of t tiles gives
t // 4 jobs of width 4, then one of width 2 and one of width 1 as t's low bits say. Each width owns
a run of gangs; its jobs lie end to end on a line of `blocks + FIXED` per job, which is cut into
equal intervals, one a gang. All of it is computed from device tensors, so that a captured plan
follows the lengths of its replay. A program then has at most two pieces of jobs that are cut, its
first and its last: two scratch slots a program hold all partial results.

With RUN > 0 pieces are runs of RUN blocks at absolute multiples instead (batch invariance), and
every piece of a request with several runs has a slot of its own.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.schedule_line import (
    BLOCK_KEYS,
    ENTRY_FIELDS,
    MERGE_FIELDS,
    MERGE_PROGRAMS_PER_SM,
    PROGRAM_FIELDS,
    TILE_ROWS,
    even_length,
    find_job,
    line_length,
    list_cut_jobs,
    merge_items,
    widen_items,
)

EVEN_SHARE = tl.constexpr(32)
"""Equal pieces may exceed cuts of the line by a block and this part."""


@triton.jit
def schedule_width(
    records,
    step,
    jobs,
    state,
    width: tl.constexpr,
    H: tl.constexpr,
    FIXED: tl.constexpr,
    RUN: tl.constexpr,
    G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the records of the jobs of one width; gives the state for the next one."""
    program_ptr, entry_ptr, merge_ptr = records
    table_ptr, stride_table, requests, cost, length, even = step
    first_row, num_rows, num_keys, slot_base = requests
    begin_program, begin_entry, merges = state
    r = tl.arange(0, jobs.shape[0])
    p = tl.arange(0, BLOCK_P)
    span = jobs * cost
    end_at = tl.cumsum(span, 0)
    at = end_at - span
    load = tl.sum(span)
    index = tl.cumsum((jobs > 0).to(tl.int32), 0) - 1
    count = tl.sum((jobs > 0).to(tl.int32))
    to = entry_ptr + (begin_entry + index) * ENTRY_FIELDS
    keep = jobs > 0
    tl.store(to + 0, first_row, mask=keep)
    tl.store(to + 1, num_rows, mask=keep)
    tl.store(to + 2, num_keys, mask=keep)
    tl.store(to + 3, r, mask=keep)
    tl.store(to + 4, slot_base, mask=keep)
    tl.store(to + 5, at, mask=keep)
    tl.store(to + 6, jobs, mask=keep)
    tl.store(to + 7, cost, mask=keep)
    tl.debug_barrier()

    # Programs of this width: gang g takes the interval [g, g + 1) * length of the line.
    gangs = tl.cdiv(load, length)
    gang = (p - begin_program) // width
    mine = (p >= begin_program) & (gang < gangs)
    start_e, start_k, start_b = find_job(
        gang * length, load, begin_entry, count, entry_ptr, mine, length, even, FIXED, RUN
    )
    stop_e, stop_k, stop_b = find_job(
        (gang + 1) * length, load, begin_entry, count, entry_ptr, mine, length, even, FIXED, RUN
    )
    record = program_ptr + p * PROGRAM_FIELDS
    tl.store(record + 0, start_e, mask=mine)
    tl.store(record + 1, start_k, mask=mine)
    tl.store(record + 2, start_b, mask=mine)
    tl.store(record + 3, stop_e, mask=mine)
    tl.store(record + 4, stop_k, mask=mine)
    tl.store(record + 5, stop_b, mask=mine)
    tl.store(record + 6, (p - begin_program) % width, mask=mine)
    tl.store(record + 7, width, mask=mine)
    live = (
        (start_e < stop_e)
        | ((start_e == stop_e) & (start_k < stop_k))
        | ((start_e == stop_e) & (start_k == stop_k) & (start_b < stop_b))
    )
    tl.store(record + 13, live.to(tl.int32), mask=mine)
    source = entry_ptr + start_e * ENTRY_FIELDS
    for field in tl.static_range(5):
        value = tl.load(source + field, mask=mine & live, other=0)
        tl.store(record + 8 + field, value, mask=mine)

    request = tl.load(source + 3, mask=mine & live, other=0).to(tl.int64)
    keys = tl.load(source + 2, mask=mine & live, other=0)
    for block in tl.static_range(2):
        key = (start_b + block) * BLOCK_KEYS
        key = tl.where(key < keys, key, start_b * BLOCK_KEYS)
        cell = table_ptr + request * stride_table + key // G
        page = tl.load(cell, mask=mine & live & (key < keys), other=0)
        tl.store(record + 14 + block, page, mask=mine)

    if RUN == 0:
        source = entry_ptr + stop_e * ENTRY_FIELDS
        stop_cost = tl.load(source + 7, mask=mine & (stop_b > 0), other=0)
        stop_at = tl.load(source + 5, mask=mine & (stop_b > 0), other=0)
        stop_at += (stop_k + 1) * stop_cost
        # The last gang that starts inside the job cut at a program's end.
        snap = tl.where(even, 0, tl.minimum(length // 16, 2))
        last = (stop_at - snap - 1) // length
        merges = list_cut_jobs(
            merge_ptr,
            merges,
            entry_ptr,
            p,
            mine & live,
            (start_e, start_k, start_b),
            (stop_e, stop_k, stop_b),
            1 + last - gang,
            width,
            (p - begin_program) % width,
            H,
        )
    return begin_program + gangs * width, begin_entry + count, merges


@triton.jit(
    do_not_specialize=["stride_table", "num_requests"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def schedule_kernel(
    query_start_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    program_ptr,  # [P, PROGRAM_FIELDS] int32, out
    entry_ptr,  # [3 * B + 1, ENTRY_FIELDS] int32, out
    merge_ptr,  # [1 + tiles, MERGE_FIELDS] int32, out; the first record holds the count
    block_table_ptr,  # [B, M] int32
    stride_table,
    num_requests,
    H: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FIXED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MERGE_COST: tl.constexpr,
    RUN: tl.constexpr,
    G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the program, entry and merge records of a step; one program runs it."""
    r = tl.arange(0, BLOCK_B)
    p = tl.arange(0, BLOCK_P)
    held = r < num_requests
    first_row = tl.load(query_start_ptr + r, mask=held, other=0)
    num_rows = tl.load(query_start_ptr + r + 1, mask=held, other=0) - first_row
    num_rows = tl.where(held, num_rows, 0)
    num_keys = tl.load(seq_lens_ptr + r, mask=held, other=0)
    tiles = (num_rows * H + TILE_ROWS - 1) // TILE_ROWS
    blocks = (num_keys + BLOCK_KEYS - 1) // BLOCK_KEYS
    cost = blocks + FIXED
    runs = tl.zeros_like(blocks)
    if RUN > 0:
        runs = tl.where(blocks > RUN, (blocks + RUN - 1) // RUN, 0)
    slot_base = tl.cumsum(runs * tiles, 0) - runs * tiles

    num4, num2, num1 = tiles // 4, tiles // 2 % 2, tiles % 2
    length = line_length(
        tl.sum(num4 * cost), tl.sum(num2 * cost), tl.sum(num1 * cost), PROGRAMS, MIN_BLOCKS
    )
    piece = even_length(tiles, blocks, PROGRAMS, MIN_BLOCKS)
    longest = tl.max(tl.where(tiles > 0, blocks, 0))
    # Whole jobs need no merge; equal pieces need fewer of them than cuts of the line.
    roomy = tl.sum(tiles) <= PROGRAMS
    whole = roomy & (longest <= tl.minimum(piece, length) + MERGE_COST)
    piece = tl.where(whole, longest, piece)
    # Nor do they make any program write two of them: that is worth some blocks.
    even = roomy & (whole | (piece <= length + 1 + length // EVEN_SHARE))
    pieces = tl.maximum(tl.cdiv(blocks, tl.maximum(piece, 1)), 1)
    # Equal jobs, several to a program: none is cut where that saves less than it costs.
    equal = tl.max(tl.where(tiles > 0, cost, 0))
    packed = tl.cdiv(length, tl.maximum(equal, 1)) * equal
    is_equal = tl.min(tl.where(tiles > 0, cost, 2147483647)) == equal
    length = tl.where(is_equal & (packed <= length + length // 32 + MERGE_COST), packed, length)
    length = tl.where(even, 1, length)
    cost = tl.where(even, pieces, cost)

    records = (program_ptr, entry_ptr, merge_ptr)
    requests = (first_row, num_rows, num_keys, slot_base)
    step = (block_table_ptr, stride_table, requests, cost, length, even)
    state = (0, 0, (0, 0))
    state = schedule_width(records, step, num4, state, 4, H, FIXED, RUN, G, BLOCK_P)
    state = schedule_width(records, step, num2, state, 2, H, FIXED, RUN, G, BLOCK_P)
    state = schedule_width(records, step, num1, state, 1, H, FIXED, RUN, G, BLOCK_P)
    begin_program, _, merges = state
    idle = (p >= begin_program) & (p < PROGRAMS)
    tl.store(program_ptr + p * PROGRAM_FIELDS + 13, 0, mask=idle)
    if RUN > 0:
        cut = tl.where(runs > 0, tiles, 0)
        first = tl.cumsum(cut, 0) - cut
        whole = merge_items(runs, tl.zeros_like(runs) + TILE_ROWS, RUN)
        last_rows = num_rows * H - (tiles - 1) * TILE_ROWS
        items = tl.where(cut > 0, (tiles - 1) * whole + merge_items(runs, last_rows, RUN), 0)
        first_item = tl.cumsum(items, 0) - items
        for tile in range(0, tl.max(tiles)):
            live = (runs > 0) & (tile < tiles)
            to = merge_ptr + (1 + first + tile) * MERGE_FIELDS
            slot = slot_base + tile * runs
            tl.store(to + 0, slot, mask=live)
            tl.store(to + 1, slot + 1, mask=live)
            tl.store(to + 2, 1, mask=live)
            tl.store(to + 3, runs, mask=live)
            tl.store(to + 4, first_row * H + tile * TILE_ROWS, mask=live)
            rows = tl.minimum(num_rows * H - tile * TILE_ROWS, TILE_ROWS)
            tl.store(to + 5, rows, mask=live)
            tl.store(to + 6, first_item + tile * whole, mask=live)
            tl.store(to + 7, merge_items(runs, rows, RUN), mask=live)
        merges = (tl.sum(cut), tl.sum(items))
    count, items = merges
    wide = (items > MERGE_PROGRAMS_PER_SM * PROGRAMS) & (RUN == 0)
    if wide:
        tl.debug_barrier()
        items = widen_items(merge_ptr, count)
    tl.store(merge_ptr, count)
    tl.store(merge_ptr + 1, items)
    tl.store(merge_ptr + 2, wide.to(tl.int32))
