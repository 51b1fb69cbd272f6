"""The walk of a program over its pieces, as `schedule.py` laid them out."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper.layouts import BLOCK


@gluon.jit
def first_piece(walk):
    """Give the position of this program's first piece and whether it has one."""
    record = walk[0] + gl.program_id(0) * 16
    at = (gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.program_id(0) * 0)
    return at, gl.load(record + 13) > 0


@gluon.jit
def read_piece(walk, at, H: gl.constexpr, RUN: gl.constexpr):
    """Read the piece at (entry, job, block), number `count` of this program.

    Gives first row, rows, keys, request, tile, end block and scratch slot (-1 where the piece is a
    whole tile and is written directly). Everything is read again rather than kept: registers are
    scarcer than cached loads. A program's first entry is copied in its record, one load nearer.
    """
    entry, job, block, count = at
    record = walk[0] + gl.program_id(0) * 16
    source = gl.where(count == 0, record + 8, walk[1] + entry * 8)
    first_row, rows, keys = gl.load(source), gl.load(source + 1), gl.load(source + 2)
    request, slot_base = gl.load(source + 3), gl.load(source + 4)
    stop_entry, stop_job, stop_block = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
    lane, width = gl.load(record + 6), gl.load(record + 7)
    tiles = (rows * H + BLOCK - 1) // BLOCK
    blocks = (keys + BLOCK - 1) // BLOCK
    low = tiles & -(2 * width)
    tile = gl.where(width == 4, job * 4, low) + lane
    end = gl.where((entry == stop_entry) & (job == stop_job), stop_block, blocks)
    slot = 2 * gl.program_id(0) + gl.where(count > 0, 1, 0)
    if RUN > 0:
        end = gl.minimum(end, (block // RUN + 1) * RUN)
        runs = (blocks + RUN - 1) // RUN
        slot = slot_base + tile * runs + block // RUN
    slot = gl.where((block == 0) & (end >= blocks), -1, slot)
    return first_row, rows, keys, request, tile, end, slot


@gluon.jit
def next_piece(walk, at, H: gl.constexpr, RUN: gl.constexpr):
    """Step past a piece; gives the next position and whether there is one."""
    entry, job, block, count = at
    _first_row, rows, keys, _request, _tile, end, _slot = read_piece(walk, at, H, RUN)
    record = walk[0] + gl.program_id(0) * 16
    stop_entry, stop_job, stop_block = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
    width = gl.load(record + 7)
    tiles = (rows * H + BLOCK - 1) // BLOCK
    jobs = gl.where(width == 4, tiles // 4, 1)
    done = end >= (keys + BLOCK - 1) // BLOCK
    job = gl.where(done, job + 1, job)
    block = gl.where(done, 0, end)
    onward = job >= jobs
    entry = gl.where(onward, entry + 1, entry)
    job = gl.where(onward, 0, job)
    inner = (job < stop_job) | ((job == stop_job) & (block < stop_block))
    more = (entry < stop_entry) | ((entry == stop_entry) & inner)
    return (entry, job, block, count + 1), more
