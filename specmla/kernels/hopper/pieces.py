"""The walk of a program over its pieces, as `schedule.py` laid them out."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper.layouts import BLOCK


@gluon.jit
def piece_end(entry, job, stop_entry, stop_job, stop_block, keys):
    """Block after the piece that starts in (entry, job)."""
    blocks = (keys + BLOCK - 1) // BLOCK
    return gl.where((entry == stop_entry) & (job == stop_job), stop_block, blocks)


@gluon.jit
def next_piece(entry, job, end, width, rows, keys, H: gl.constexpr):
    """Step past a piece that ended at block `end`; gives (entry, job, block)."""
    tiles = (rows * H + BLOCK - 1) // BLOCK
    jobs = gl.where(width == 4, tiles // 4, 1)
    done = end >= (keys + BLOCK - 1) // BLOCK
    job = gl.where(done, job + 1, job)
    block = gl.where(done, 0, end)
    onward = job >= jobs
    return gl.where(onward, entry + 1, entry), gl.where(onward, 0, job), block


@gluon.jit
def is_before(entry, job, block, stop_entry, stop_job, stop_block):
    """Whether there is a piece left."""
    same = entry == stop_entry
    inner = (job < stop_job) | ((job == stop_job) & (block < stop_block))
    return (entry < stop_entry) | (same & inner)


@gluon.jit
def tile_of(rows, job, width, lane, H: gl.constexpr):
    """Tile of a job's lane; see `schedule_line.first_tile`."""
    tiles = (rows * H + BLOCK - 1) // BLOCK
    low = tiles // (2 * width) * (2 * width)
    return gl.where(width == 4, job * 4, low) + lane


@gluon.jit
def slot_of(block, end, keys, first):
    """Scratch slot of a piece, or -1 where it is the whole of its tile and written directly."""
    blocks = (keys + BLOCK - 1) // BLOCK
    slot = 2 * gl.program_id(0) + first
    return gl.where((block == 0) & (end >= blocks), -1, slot)
