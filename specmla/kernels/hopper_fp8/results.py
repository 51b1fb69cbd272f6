"""End of a piece: two halves of its keys become one, outputs and LSE are written."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specmla.kernels.gluon_api import arrive, barrier, retype, wait
from specmla.kernels.hopper_fp8.layouts import BLOCK, COLUMNS, HALVES, LN_2, MMA, ROWS
from specmla.kernels.hopper_fp8.scores import scale_columns
from specmla.kernels.hopper_fp8.tiles import write_out, write_part


@gluon.jit
def share_halves(exchange, queries, state, phase, W: gl.constexpr):
    """Merge with the other partition's state of the same rows; half `W` of the columns is whole.

    The other half goes to the other partition, in the place of queries, which have served.
    """
    maxima, sums, sent, taken = exchange
    row_max, total, left, right = state
    halves = retype(queries, gl.float32, [2, 256, ROWS], HALVES)
    maxima.index(W).store(row_max)
    sums.index(W).store(total)
    if W == 0:
        halves.index(0).store(right)
    else:
        halves.index(1).store(left)
    barrier()
    arrive(sent[W])
    wait(sent[1 - W], phase)
    other_max = maxima.index(1 - W).load(COLUMNS)
    new_max = gl.maximum(row_max, other_max)
    own, other = gl.exp2(row_max - new_max), gl.exp2(other_max - new_max)
    total = total * own + sums.index(1 - W).load(COLUMNS) * other
    theirs = scale_columns(halves.index(1 - W).load(MMA), other)
    if W == 0:
        left = scale_columns(left, own) + theirs
    else:
        right = scale_columns(right, own) + theirs
    barrier()
    arrive(taken[1 - W])
    return new_max, total, left, right


@gluon.jit
def write_results(
    target, place, state, value_scale, W: gl.constexpr, H: gl.constexpr, RUN: gl.constexpr
):
    """Write the LSE and the normalised output of a piece, or this partition's half of them."""
    out_ptr, lse_ptr, part_ptr, part_lse_ptr = target
    first_row, rows, _keys, _request, tile, _end, slot = place
    row_max, total, left, right = state
    live = rows * H - tile * BLOCK
    both = (live <= ROWS) & (RUN == 0)
    first = W * gl.where(both, 0, ROWS)
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    if (not both) | (W == 0):
        lse = gl.where(empty, float("-inf"), row_max + gl.log2(safe))
        row = first + gl.arange(0, ROWS, COLUMNS)
        if slot < 0:
            to = lse_ptr + first_row * H + tile * BLOCK + row
            gl.store(to, lse * LN_2, mask=row < live)
        else:
            fields: gl.constexpr = 3 if part_ptr.dtype.element_ty == gl.float16 else 1
            gl.store(part_lse_ptr + slot * (fields * BLOCK) + row, lse, mask=row < live)
    inverse = gl.where(empty, 0.0, value_scale / safe)
    where = (out_ptr, part_ptr, part_lse_ptr, slot, first_row * H + tile * BLOCK, first, live)
    if (not both) | (W == 0):
        write_half(where, scale_columns(left, inverse), 0)
    if (not both) | (W == 1):
        write_half(where, scale_columns(right, inverse), 1)


@gluon.jit
def write_half(where, acc, half: gl.constexpr):
    """Write half the columns to the output, or to the scratch slot of the piece if it has one."""
    out_ptr, part_ptr, part_lse_ptr, slot, at_row, first, live = where
    if slot < 0:
        write_out(acc, out_ptr, at_row, first, live, half)
    else:
        write_part(acc, part_ptr, part_lse_ptr, slot, first, live, half)
