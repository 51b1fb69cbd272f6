"""The walk of a program over its pieces, those of more than N rows in several passes."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.hopper.layouts import BLOCK


@gluon.jit
def next_pass(walk, at, piece, row, H: gl.constexpr, N: gl.constexpr):
    """Step past a pass, whose first row in its tile is `row`; gives whether there is a next one.

    `piece` is (rows, keys, tile, end) as read at `at`: `next_piece` would read it all again.
    """
    entry, job, block, count = at
    rows, keys, tile, end = piece
    again = row + N < gl.minimum(rows * H - tile * BLOCK, BLOCK)
    record = walk[0] + gl.program_id(0) * 16
    stop_entry, stop_job, stop_block = gl.load(record + 3), gl.load(record + 4), gl.load(record + 5)
    jobs = gl.where(gl.load(record + 7) == 4, (rows * H + BLOCK - 1) // BLOCK // 4, 1)
    done = end >= (keys + BLOCK - 1) // BLOCK
    next_job = gl.where(done, job + 1, job)
    next_block = gl.where(done, 0, end)
    onward = next_job >= jobs
    next_entry = gl.where(onward, entry + 1, entry)
    next_job = gl.where(onward, 0, next_job)
    inner = (next_job < stop_job) | ((next_job == stop_job) & (next_block < stop_block))
    more = (next_entry < stop_entry) | ((next_entry == stop_entry) & inner)
    after = (
        gl.where(again, entry, next_entry),
        gl.where(again, job, next_job),
        gl.where(again, block, next_block),
        gl.where(again, count, count + 1),
    )
    return after, gl.where(again, row + N, 0), again | more
