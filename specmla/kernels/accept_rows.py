"""Accept, second pass: maximum and mass of each row from its chunks, and the cut of greedy rows."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import KEEP_ALL, exponent_scale, sort_key
from specmla.kernels.direct import DirectKernel

NUM_WARPS = 8
"""As many as `filter_rows` has: the mass of a request must not depend on what its mates filter."""


@triton.jit
def load_parts(parts, place, C, CHUNKS: tl.constexpr):
    """Load maximum, sum and first id of each chunk [CHUNKS]; parts: pointers to [places, C]."""
    chunk = tl.arange(0, CHUNKS)
    there, at = chunk < C, place * C + chunk
    part_max = tl.load(parts[0] + at, mask=there, other=float("-inf"))
    part_sum = tl.load(parts[1] + at, mask=there, other=0.0)
    return part_max, part_sum, tl.load(parts[2] + at, mask=there, other=2147483647)


@triton.jit
def reduce_parts(parts, temperature):
    """Give maximum, sum of exponents, first id of the maximum, and whether it has no distribution.

    Args:
        parts: what `load_parts` gave.
    """
    part_max, part_sum, top = parts
    row_max = tl.max(part_max, 0)
    wrong = (tl.min(top, 0) < 0) | (row_max == float("-inf"))
    row_max = tl.where(wrong, 0.0, row_max)
    live = part_max > float("-inf")
    shrunk = tl.exp2((part_max - row_max) * exponent_scale(temperature))
    mass = tl.sum(tl.where(live, part_sum * shrunk, 0.0), 0)
    first = tl.min(tl.where(part_max == row_max, top, 2147483647), 0)
    return row_max, mass, first, wrong


@triton.jit
def store_row(rows, place, row_max, mass, first, wrong, greedy):
    """Store a row that keeps all, or the first id of its maximum alone.

    Args:
        rows: pointers to maximum, mass, cut and flag.
    """
    tl.store(rows[0] + place, row_max)
    tl.store(rows[1] + place, tl.where(greedy, 1.0, mass))
    tl.store(rows[2] + place, tl.where(greedy, sort_key(row_max, first), KEEP_ALL))
    tl.store(rows[3] + place, wrong.to(tl.int32))


@triton.jit
def store_unreached(rows, place):
    """Store a row that can't be reached: as if it were good, with all ids."""
    tl.store(rows[0] + place, 0.0)
    tl.store(rows[1] + place, 1.0)
    tl.store(rows[2] + place, KEEP_ALL)
    tl.store(rows[3] + place, 0)


@triton.jit(do_not_specialize=["K"])
def accept_rows_kernel(
    max_ptr,  # [B * (K + 1)] float32
    mass_ptr,  # [B * (K + 1)] float32, sum of exponents of what is kept
    cut_ptr,  # [B * (K + 1)] int64, least key that is kept
    wrong_ptr,  # [B * (K + 1)] int32, 1 where the row has no distribution
    part_max_ptr,  # [B * (K + 1), C] float32
    part_sum_ptr,  # [B * (K + 1), C] float32
    part_top_ptr,  # [B * (K + 1), C] int32
    drafts_ptr,  # [B, K] int64
    temperature_ptr,  # [B] float32
    K,
    C,
    CHUNKS: tl.constexpr,
):
    """One row; those that can't be reached are marked as good: maximum 0, mass 1, all kept."""
    place = tl.program_id(0)
    b, j = place // (K + 1), place % (K + 1)
    rows = (max_ptr, mass_ptr, cut_ptr, wrong_ptr)
    temperature = tl.load(temperature_ptr + b)
    parts = load_parts((part_max_ptr, part_sum_ptr, part_top_ptr), place, C, CHUNKS)
    if tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0:
        store_unreached(rows, place)
        return
    row_max, mass, first, wrong = reduce_parts(parts, temperature)
    store_row(rows, place, row_max, mass, first, wrong, temperature == 0)


ROWS = DirectKernel(accept_rows_kernel)


def launch_rows(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    drafts: Tensor,
    temperature: Tensor,
) -> None:
    """Fill maximum, mass, cut and flag of each row from the parts of its chunks."""
    chunks = parts[0].shape[1]
    with torch.cuda.device_of(drafts):
        ROWS.launch(
            (parts[0].shape[0],),
            *rows,
            *parts,
            drafts,
            temperature,
            drafts.shape[1],
            chunks,
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
