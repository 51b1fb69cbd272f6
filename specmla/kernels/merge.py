"""Merge of the pieces of cut tiles: sums of weighted values and of weights, from scratch slots.

Runs after the kernel of `hopper/` on the tiles that `schedule.py` listed. An item is 8 rows and so
many columns that the pieces of a tile, usually all of them, are loaded at once: what it would
otherwise wait for is load after load. Rows that no query owns are in no item. The items of all
tiles are shared out evenly, so that a tile in many pieces gets as many programs.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from specmla.kernels.discard import DISCARD, DISCARD_OPERANDS
from specmla.kernels.gluon_api import barrier

FLOOR = gl.constexpr(-1.0e30)
LN_2 = gl.constexpr(0.6931471805599453)
FIELDS = gl.constexpr(8)
SEARCH = gl.constexpr(256)
"""Tiles compared at a time."""
WARPS = 4
FEW = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 2, 8, 2], [1, 4, 1, 1], [3, 2, 1, 0]))
SOME = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 2, 8, 2], [2, 2, 1, 1], [3, 2, 1, 0]))
MANY_PAIRS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 2, 8, 2], [4, 1, 1, 1], [3, 2, 1, 0]))
MANY = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [2, 1, 8, 2], [4, 1, 1, 1], [3, 2, 1, 0]))
"""Of values [pieces, groups, 8, 8], by the number of pieces: a thread loads 8 times 16 bytes."""


@gluon.jit
def merge_item(
    where, BLOCKS: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr, AHEAD: gl.constexpr
):
    """Merge 8 rows x (8 * BLOCKS) columns of one tile, adding up CHUNK pieces at a time.

    Values are [CHUNK, BLOCKS, 8 rows, 8 columns], as a slot stores them: each of its two halves of
    256 columns in groups of 8 x 8. AHEAD chunks are loaded before the first of them is added.
    """
    N_ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, OUT))
    part_ptr, part_stat_ptr, record, out_ptr, lse_ptr, item = where
    first, second, step, pieces, base, live = record
    groups = (live + 7) // 8
    group, column = item % groups, item // groups * (8 * BLOCKS)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, N_ROWS))
    r_lse = gl.arange(0, 8, gl.SliceLayout(0, N_ROWS))
    r = gl.arange(0, 8, ROWS)
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))
    k = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    inner = column // 256 * 16384 + group * 2048 + column % 256 * 8
    run = block[:, None, None] * 64 + r[None, :, None] * 8 + k[None, None, :]
    # Slots from here on: what is added to a 64-bit base fits 32 bits and takes half the registers.
    origin = second - step
    part_at = part_ptr + origin.to(gl.int64) * 32768

    top = gl.full([8], FLOOR, gl.float32, gl.SliceLayout(0, N_ROWS))
    total = gl.full([8], 0.0, gl.float32, gl.SliceLayout(0, N_ROWS))
    acc = gl.full([BLOCKS, 8, 8], 0.0, gl.float32, OUT)
    for start in range(0, pieces, CHUNK * AHEAD):
        loaded = ()
        for ahead in gl.static_range(AHEAD):
            n = start + ahead * CHUNK + i
            slot = gl.where(n == 0, first, second + (n - 1) * step)
            at = part_stat_ptr + slot[:, None] * 128 + group * 8 + r_lse[None, :]
            used = (n < pieces)[:, None]
            peak = gl.load(at, mask=used, other=FLOOR, cache_modifier=".cg")
            sums = gl.load(at + 64, mask=used, other=0.0, cache_modifier=".cg")
            n_wide = (start + ahead * CHUNK) + gl.arange(
                0, CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
            )
            slot_wide = gl.where(n_wide == 0, first - origin, n_wide * step)
            offset = (slot_wide * 32768 + inner)[:, None, None, None] + run[None, :, :, :]
            held = (n_wide < pieces)[:, None, None, None]
            value = gl.load(part_at + offset, mask=held, other=0.0, cache_modifier=".cg")
            loaded += ((peak, sums, value),)
        for ahead in gl.static_range(AHEAD):
            peak, sums, value = loaded[ahead]
            new_top = gl.maximum(top, gl.max(peak, axis=0))
            shrink = gl.exp2(top - new_top)
            weight = gl.exp2(peak - new_top[None, :])
            total = total * shrink + gl.sum(sums * weight, axis=0)
            value = gl.sum(value * weight[:, None, :, None], axis=0)
            acc = acc * gl.convert_layout(shrink, ROWS)[None, :, None] + value
            top = new_top

    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    row = group * 8 + r
    to = (base + row).to(gl.int64)[None, :, None] * 512 + column
    to = out_ptr + (to + block[:, None, None] * 8 + k[None, None, :])
    out = acc * gl.convert_layout(1.0 / safe, ROWS)[None, :, None]
    gl.store(to, out.to(out_ptr.dtype.element_ty), mask=(row < live)[None, :, None])
    value_lse = gl.where(empty, float("-inf"), (top + gl.log2(safe)) * LN_2)
    at_row = group * 8 + r_lse
    gl.store(lse_ptr + base + at_row, value_lse, mask=(at_row < live) & (column == 0))
    discard_item(part_ptr, record, inner, BLOCKS)


@gluon.jit
def discard_item(part_ptr, record, inner, BLOCKS: gl.constexpr):
    """Drop the values of an item, which lie `inner` behind the start of each slot, from L2.

    An item's 8 x 8 values are two lines of 128 bytes, so no other item reads any of them.
    """
    first, second, step, pieces, _base, _live = record
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    LINES: gl.constexpr = 2 * BLOCKS
    barrier()  # all threads have read theirs
    for start in range(0, pieces * LINES, 128):
        n, line = (start + lane) // LINES, (start + lane) % LINES
        slot = gl.where(n == 0, first, second + (n - 1) * step)
        to = part_ptr + (slot.to(gl.int64) * 32768 + (inner + line * 32))
        gl.inline_asm_elementwise(
            DISCARD,
            DISCARD_OPERANDS,
            [to.to(gl.int64), (n < pieces).to(gl.int32)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def find_tile(merge_ptr, count, item):
    """Find the listed tile that an item belongs to: the last one that starts at or before it."""
    lane = gl.arange(0, SEARCH, gl.BlockedLayout([2], [32], [4], [0]))
    tile = -1
    for start in range(0, count, SEARCH):
        i = start + lane
        first = gl.load(merge_ptr + (1 + i) * FIELDS + 6, mask=i < count, other=2147483647)
        tile += gl.sum((first <= item).to(gl.int32), axis=0)
    return gl.maximum(tile, 0)


@gluon.jit
def read_record(merge_ptr, count, item):
    """Read the record of an item's tile; which of the tile's items it is, of how many."""
    record = merge_ptr + (1 + find_tile(merge_ptr, count, item)) * FIELDS
    first, second, step = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    pieces, base, live = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
    begin, items = gl.load(record + 6), gl.load(record + 7)
    return (first, second, step, pieces, base, live), item - begin, items


@gluon.jit(do_not_specialize_on_alignment=["merge_ptr"])
def merge_kernel(
    part_ptr,  # [slots, 2, 64, 256] float32, halves in groups of 8 x 8; undefined afterwards
    part_stat_ptr,  # [slots, 2, 64] float32: largest base-2 score, sum of weights
    merge_ptr,  # [1 + tiles, MERGE_FIELDS] int32
    out_ptr,  # [T, H, 512]
    lse_ptr,  # [T, H] float32
    INVARIANT: gl.constexpr,
):
    """Merge every listed tile: a program takes a run of items, of one tile where possible.

    The form decides in which order pieces are added up. For a batch-invariant plan (INVARIANT) all
    add four at a time, in their order, each thread its own: a row that does not see its tile's last
    piece must be merged as it is in a shorter tile, without that piece, and a piece that is not
    there adds exact zeros.
    """
    # The table is older than the kernel before this one: it may be read before that one ends.
    count, total, wide = gl.load(merge_ptr), gl.load(merge_ptr + 1), gl.load(merge_ptr + 2) != 0
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.program_id(0) * share
    record, item, items = read_record(merge_ptr, count, begin)
    # A kernel after this one may start to set itself up; it waits for the end of this one.
    cuda.gdc_launch_dependents()
    # One program waits even if there is nothing to do: whoever follows takes the end of this kernel
    # for the end of that one. Other idle programs make room for whoever follows.
    if (begin < total) | (gl.program_id(0) == 0):
        cuda.gdc_wait()
    for at in range(begin, gl.minimum(begin + share, total)):
        where = (part_ptr, part_stat_ptr, record, out_ptr, lse_ptr, item)
        if record[3] <= 4:
            merge_item(where, 16, 4, FEW, 1)
        elif INVARIANT:
            merge_item(where, 8, 4, FEW, 2)
        elif record[3] <= 8:
            merge_item(where, 8, 8, FEW, 1)
        elif wide & (record[3] <= 16):
            merge_item(where, 8, 8, FEW, 2)
        elif record[3] <= 16:
            merge_item(where, 4, 16, SOME, 1)
        elif record[3] <= 32:
            merge_item(where, 2, 32, MANY_PAIRS, 1)
        else:
            merge_item(where, 1, 64, MANY, 1)
        item += 1
        if item == items:
            record, item, items = read_record(merge_ptr, count, at + 1)
