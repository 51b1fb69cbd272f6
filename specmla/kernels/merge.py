"""Merge of the pieces of cut tiles: partial outputs and base-2 LSE from scratch slots, in float32.

Runs after the kernel of `hopper/` on the tiles that `schedule.py` listed; programs share items of
8 rows and some columns, so that one tile in 100 pieces and 100 in 2 pieces both fill the device.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specmla.kernels.prims import LN_2, MAX_FLOOR
from specmla.kernels.schedule_line import MERGE_FIELDS


@triton.jit
def merge_item(
    part_ptr,
    part_lse_ptr,
    record,
    out_ptr,
    lse_ptr,
    group,
    column,
    COLS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge 8 rows x COLS columns of one tile."""
    first, second, step = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    pieces = tl.load(record + 3)
    base, live = tl.load(record + 4), tl.load(record + 5)
    i = tl.arange(0, CHUNK)
    r = tl.arange(0, 8)
    top = tl.full([8], MAX_FLOOR, tl.float32)
    total = tl.zeros([8], tl.float32)
    for start in range(0, pieces, CHUNK):
        n = start + i
        slot = tl.where(n == 0, first, second + (n - 1) * step)
        at = part_lse_ptr + slot[:, None] * 64 + group * 8 + r[None, :]
        lse = tl.load(at, mask=(n < pieces)[:, None], other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(lse - new_top[None, :]), axis=0)
        top = new_top
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)

    block = tl.arange(0, COLS // 8)
    k = tl.arange(0, 8)
    inner = column * COLS // 256 * 16384 + group * 2048 + column * COLS % 256 * 8
    run = block[:, None, None] * 64 + r[None, :, None] * 8 + k[None, None, :]
    acc = tl.zeros([COLS // 8, 8, 8], tl.float32)
    for start in range(0, pieces, CHUNK):
        n = start + i
        slot = tl.where(n == 0, first, second + (n - 1) * step)
        at = part_lse_ptr + slot[:, None] * 64 + group * 8 + r[None, :]
        lse = tl.load(at, mask=(n < pieces)[:, None], other=float("-inf"))
        weight = tl.exp2(lse - top[None, :]) / safe[None, :]
        source = part_ptr + (slot.to(tl.int64) * 32768 + inner)[:, None, None, None] + run[None]
        value = tl.load(source, mask=(n < pieces)[:, None, None, None], other=0.0)
        acc += tl.sum(value * weight[:, None, :, None], axis=0)

    row = group * 8 + r
    to = (base + row).to(tl.int64)[None, :, None] * 512 + column * COLS
    cols = block[:, None, None] * 8 + k[None, None, :]
    keep = (row < live)[None, :, None]
    tl.store(out_ptr + to + cols, acc.to(out_ptr.dtype.element_ty), mask=keep)
    if column == 0:
        lse = tl.where(empty, float("-inf"), (top + tl.log2(safe)) * LN_2)
        tl.store(lse_ptr + base + row, lse, mask=row < live)


@triton.jit
def merge_kernel(
    part_ptr,  # [slots, 2, 64, 256] float32, each half in groups of 8 x 8
    part_lse_ptr,  # [slots, 64] float32, base 2
    merge_ptr,  # [1 + tiles, MERGE_FIELDS] int32
    out_ptr,  # [T, H, 512]
    lse_ptr,  # [T, H] float32
    PDL: tl.constexpr,
):
    """Merge every listed tile."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = tl.load(merge_ptr)
    if count * 32 < programs:
        for item in range(program, count * 128, programs):
            record = merge_ptr + (1 + item // 128) * MERGE_FIELDS
            group, column = item % 8, item // 8 % 16
            merge_item(
                part_ptr, part_lse_ptr, record, out_ptr, lse_ptr, group, column, COLS=32, CHUNK=16
            )
    else:
        for item in range(program, count * 32, programs):
            record = merge_ptr + (1 + item // 32) * MERGE_FIELDS
            group, column = item % 8, item // 8 % 4
            merge_item(
                part_ptr, part_lse_ptr, record, out_ptr, lse_ptr, group, column, COLS=128, CHUNK=4
            )
