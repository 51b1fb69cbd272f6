"""Filter: maximum, cut and mass of each row, and the ids that it may keep, by one program a row.

What `accept_rows` does, for steps in which some request keeps the top ids only. The row itself is
read once more only where a group of ids can hold one that is kept (`filter_groups`).
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import exponent_scale, order_bits
from specmla.kernels.accept_rows import (
    NUM_WARPS,
    load_parts,
    reduce_parts,
    store_row,
    store_unreached,
)
from specmla.kernels.direct import DirectKernel
from specmla.kernels.filter_groups import (
    GUESS,
    LOWEST,
    is_filtered,
    least_by_mass,
    least_by_number,
    load_tops,
    mass_target,
)
from specmla.kernels.filter_held import FEW, TILE, cut_held, hold_ids
from specmla.kernels.filter_search import cut_row

OPTIONS = {} if torch.version.hip else {"maxnreg": 128}
"""Two programs fit a multiprocessor: with one, 160 rows would take two rounds of them. They spill
a little for that, and are faster than one that does not."""

FINE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of float32 in which numbers of another type do not differ."""


@triton.jit
def least_held(
    top_at, groups, place, row_max, scale, target, guess, filters, edge, W, C,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, FINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give `order_bits` of a logit such that no id below it is kept.

    Args:
        top_at: what `load_tops` takes.
        groups: pointers to the weights of groups, and to the maxima of chunks that they refer to.
        target, guess: see `least_by_mass`.
        filters: top_k, top_p and min_p.
        edge: `order_bits` of the least logit that min-p keeps.
    """
    top_k, _top_p, min_p = filters
    least, top = edge, load_tops(top_at, GROUPS)
    if (top_k > 0) & (top_k < W):
        least = tl.maximum(least_by_number(top, row_max, scale, top_k, FINE), edge)
    elif min_p == 0:
        number: tl.constexpr = BLOCK // GROUP
        chunk = tl.arange(0, GROUPS // number)
        chunk_max = tl.load(groups[1] + place * C + chunk, mask=chunk < C, other=float("-inf"))
        shrunk = tl.where(chunk_max > float("-inf"), tl.exp2((chunk_max - row_max) * scale), 0.0)
        shrunk = tl.broadcast_to(shrunk[:, None], [GROUPS // number, number])
        group = tl.arange(0, GROUPS)
        at = groups[0] + place.to(tl.int64) * C * number + group
        weight = tl.load(at, mask=group < C * number, other=0.0) * tl.reshape(shrunk, [GROUPS])
        least = least_by_mass(top, weight, row_max, scale, target, guess, GROUP, FINE)
    return least


@triton.jit(do_not_specialize=["K"])
def filter_rows_kernel(
    max_ptr,  # [B * (K + 1)] float32
    mass_ptr,  # [B * (K + 1)] float32, sum of exponents of what is kept
    cut_ptr,  # [B * (K + 1)] int64, least key that is kept
    wrong_ptr,  # [B * (K + 1)] int32, 1 where the row has no distribution
    found_ptr,  # [B * (K + 1), SLOTS] float32, logits that may be kept
    found_id_ptr,  # [B * (K + 1), SLOTS] int32, their ids, rising
    number_ptr,  # [B * (K + 1)] int32, how many; 0: none are held
    group_ptr,  # [B * (K + 1), 2 * SLOTS] int32, scratch
    group_max_ptr,  # [B * (K + 1), C * BLOCK / GROUP] float32
    group_sum_ptr,  # [B * (K + 1), C * BLOCK / GROUP] float32
    part_max_ptr,  # [B * (K + 1), C] float32
    part_sum_ptr,  # [B * (K + 1), C] float32
    part_top_ptr,  # [B * (K + 1), C] int32
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    temperature_ptr,  # [B] float32
    top_k_ptr,  # [B] int64
    top_p_ptr,  # [B] float32
    min_p_ptr,  # [B] float32
    K,
    W,
    C,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    FINE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; those that can't be reached are marked as good: maximum 0, mass 1, all kept."""
    place = tl.program_id(0)
    b, j = place // (K + 1), place % (K + 1)
    rows, parts = (
        (max_ptr, mass_ptr, cut_ptr, wrong_ptr),
        (part_max_ptr, part_sum_ptr, part_top_ptr),
    )
    temperature, row = tl.load(temperature_ptr + b), tl.load(table_ptr + place)
    parts = load_parts(parts, place, C, CHUNKS)
    GROUPS: tl.constexpr = CHUNKS * (BLOCK // GROUP)
    groups_of_row = C * (BLOCK // GROUP)
    top_at = (group_max_ptr + place.to(tl.int64) * groups_of_row, groups_of_row)
    top_k, top_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b).to(tl.float64)
    min_p = tl.load(min_p_ptr + b)
    tl.store(number_ptr + place, 0)
    if tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0:
        store_unreached(rows, place)
        return
    row_max, mass, first, wrong = reduce_parts(parts, temperature)
    if wrong | (is_filtered(temperature, top_k, top_p, min_p, W) == 0):
        store_row(rows, place, row_max, mass, first, wrong, temperature == 0)
        return
    scale, filters = exponent_scale(temperature), (top_k, top_p, min_p)
    edge = order_bits(row_max + tl.log2(min_p) / scale)
    edge = tl.maximum(tl.where(min_p > 0, edge, LOWEST), LOWEST)
    held, groups = (found_ptr, found_id_ptr, group_ptr), (group_sum_ptr, part_max_ptr)
    by_mass = (min_p == 0) & ((top_k <= 0) | (top_k >= W))
    target, guess, number, again = mass_target(mass, top_p), 0.0 * scale + GUESS, 0 * place, 1
    for _ in range(2):
        if again != 0:
            least = least_held(
                top_at, groups, place, row_max, scale, target, guess, filters, edge, W, C, GROUP,
                GROUPS, FINE, BLOCK,
            )  # fmt: skip
            number, found = hold_ids(
                held, place, least, top_at, logits_ptr, row, row_max, scale, W, SLOTS, FEW, TILE,
                GROUP, GROUPS,
            )  # fmt: skip
            short = by_mass & (guess > 0) & (number <= SLOTS) & (found < target)
            again, guess = short.to(tl.int32), 0.0 * guess
    mass = mass.to(tl.float64)
    if number <= FEW:
        cut, mass = cut_held(
            held, place, number, mass, row_max, scale, edge, filters, W, SLOTS, FEW, FINE
        )
    elif number <= 2 * FEW:
        cut, mass = cut_held(
            held, place, number, mass, row_max, scale, edge, filters, W, SLOTS, 2 * FEW, FINE
        )
    elif number <= SLOTS:
        cut, mass = cut_held(
            held, place, number, mass, row_max, scale, edge, filters, W, SLOTS, SLOTS, FINE
        )
    else:
        cut, mass = cut_row(
            logits_ptr, row, mass, row_max, scale, edge, filters, W, 2 * C, BLOCK // 2
        )
    tl.store(number_ptr + place, tl.where(number <= SLOTS, number, 0))
    tl.store(max_ptr + place, row_max)
    tl.store(mass_ptr + place, mass.to(tl.float32))
    tl.store(cut_ptr + place, cut)
    tl.store(wrong_ptr + place, 0)


ROWS = DirectKernel(filter_rows_kernel)


def launch_filter_rows(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    held: tuple[Tensor, Tensor, Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    groups: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    block: int,
    group: int,
) -> None:
    """Fill what is known of each row.

    Args:
        rows: maximum, mass, cut and flag [B * (K + 1)].
        held: logits, ids [B * (K + 1), SLOTS] and number [B * (K + 1)].
        parts, groups: what the first pass left.
        inputs: logits, table and drafts.
        sampling: temperature, top_k, top_p and min_p [B].
        block, group: ids of a chunk, and of a group.
    """
    logits, slots, chunks = inputs[0], held[0].shape[1], parts[0].shape[1]
    with torch.cuda.device_of(logits):
        ROWS.launch(
            (len(rows[0]),),
            *rows,
            *held,
            held[1].new_empty(len(held[1]), 2 * slots),
            *groups,
            *parts,
            *inputs,
            *sampling,
            inputs[2].shape[1],
            logits.shape[1],
            chunks,
            SLOTS=slots,
            FEW=max(slots // FEW, 1),
            TILE=min(TILE * 2 // logits.element_size(), slots),
            GROUP=group,
            FINE=FINE_BITS[logits.dtype],
            CHUNKS=triton.next_power_of_2(chunks),
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **OPTIONS,
        )
