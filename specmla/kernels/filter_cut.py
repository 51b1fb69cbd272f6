"""Filter, last pass: the least key that each row keeps, and the mass from there on."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import (
    KEEP_ALL,
    exponent_scale,
    key_logit,
    load_logits,
    sort_key,
)
from specmla.kernels.direct import DirectKernel
from specmla.kernels.filter_hist import is_searched

NUM_WARPS = 8
FEW = tl.constexpr(8)
"""A row that fills no more than this part of its slots looks at no others."""


@triton.jit
def weight_above(key, least, logits_ptr, row, row_max, scale, W, COUNT, C, BLOCK: tl.constexpr):
    """Sum weights (or count, if COUNT) of the row's ids whose key is at least both bounds."""
    total = tl.zeros((), tl.float64)
    for chunk in range(C):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits_ptr, row, ids, W)
        own = sort_key(x, ids)
        weight = tl.where(COUNT != 0, 1.0, tl.exp2((x - row_max) * scale))
        use = (own >= key) & (own >= least) & (ids < W)
        total += tl.sum(tl.where(use, weight, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def search_row(
    target, least, logits_ptr, row, row_max, scale, W, COUNT, C, BLOCK: tl.constexpr
):  # fmt: skip
    """Give the largest key, of those at or above `least`, from which on the weight reaches target.

    One read of the row for each of 64 bits: for rows that keep more ids than are collected.
    """
    low, high = least, sort_key(row_max, tl.zeros((), tl.int32)) + 1
    for _ in range(64):
        if high - 1 > low:
            # Halves first: the sum of both may not fit.
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            got = weight_above(middle, least, logits_ptr, row, row_max, scale, W, COUNT, C, BLOCK)
            reaches = got >= target
            low = tl.where(reaches, middle, low)
            high = tl.where(reaches, high, middle)
    return low


@triton.jit
def search_found(target, least, high, keys, weight):
    """Give the largest key, of those at or above `least`, from which on the weight reaches target.

    What `search_row` does, over ids that are held: 64 short sums take less than sorting them.
    """
    low = least
    for _ in range(64):
        if high - 1 > low:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            reaches = tl.sum(tl.where(keys >= middle, weight, 0.0), 0) >= target
            low = tl.where(reaches, middle, low)
            high = tl.where(reaches, high, middle)
    return low


@triton.jit
def cut_found(
    found, at, number, kept_mass, row_max, scale, least, top_k, top_p, W, SLOTS: tl.constexpr
):
    """Give cut and mass of a row; the ids that matter are in `number` of SLOTS slots from `at`."""
    found_ptr, found_id_ptr = found
    slot = tl.arange(0, SLOTS)
    x = tl.load(found_ptr + at + slot, mask=slot < number, other=0.0)
    keys = sort_key(x, tl.load(found_id_ptr + at + slot, mask=slot < number, other=0))
    high = sort_key(row_max, tl.zeros((), tl.int32)) + 1
    live = (slot < number) & (keys >= least)
    # Sums that round below a target keep all that was found, no id beyond.
    cut = tl.maximum(least, tl.min(tl.where(live, keys, high), 0))
    base = kept_mass
    if (top_k > 0) & (top_k < W):
        cut = search_found(top_k.to(tl.float64), cut, high, keys, tl.where(live, 1.0, 0.0))
    weight = tl.exp2((key_logit(keys) - row_max) * scale)
    weight = tl.where(live & (keys >= cut), weight, 0.0).to(tl.float64)
    if (top_k > 0) & (top_k < W):
        base = tl.sum(weight, 0)
    if top_p < 1:
        cut = search_found(tl.maximum(top_p * base, 1.0e-30), cut, high, keys, weight)
    return cut, tl.sum(tl.where(keys >= cut, weight, 0.0), 0)


@triton.jit(do_not_specialize=["K"])
def filter_cut_kernel(
    cut_ptr,  # [B * (K + 1)] int64
    mass_ptr,  # [B * (K + 1)] float32; read where nothing is searched, written
    found_ptr,  # [B * (K + 1), SLOTS] float32
    found_id_ptr,  # [B * (K + 1), SLOTS] int32
    number_ptr,  # [B * (K + 1)] int32
    kept_ptr,  # [B * (K + 1), C] float32
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    max_ptr,  # [B * (K + 1)] float32
    wrong_ptr,  # [B * (K + 1)] int32
    temperature_ptr,  # [B] float32
    top_k_ptr,  # [B] int64
    top_p_ptr,  # [B] float32
    min_p_ptr,  # [B] float32
    K,
    W,
    C,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; what keeps all, is greedy or no distribution stays as `accept_rows` left it."""
    place = tl.program_id(0)
    b, j = place // (K + 1), place % (K + 1)
    temperature = tl.load(temperature_ptr + b)
    gap = tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0
    if gap | (temperature == 0) | (tl.load(wrong_ptr + place) != 0):
        return
    top_k, top_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b).to(tl.float64)
    min_p = tl.load(min_p_ptr + b)
    searched = is_searched(temperature, top_k, top_p, W)
    if (min_p == 0) & (searched == 0):
        return
    row_max, scale = tl.load(max_ptr + place), exponent_scale(temperature)
    chunks = tl.arange(0, CHUNKS)
    kept = tl.load(kept_ptr + place * C + chunks, mask=chunks < C, other=0.0)
    mass = tl.sum(kept.to(tl.float64), 0)
    # The key of an id past all of this logit's: what min-p keeps is above it.
    edge = row_max + tl.log2(min_p) / scale
    cut = tl.where(min_p > 0, sort_key(edge, place * 0 + W), KEEP_ALL)
    if searched:
        number = tl.load(number_ptr + place)
        found = (found_ptr, found_id_ptr)
        at = place.to(tl.int64) * SLOTS
        if number <= SLOTS // FEW:
            cut, mass = cut_found(
                found, at, number, mass, row_max, scale, cut, top_k, top_p, W, SLOTS // FEW
            )
        elif number <= SLOTS:
            cut, mass = cut_found(
                found, at, number, mass, row_max, scale, cut, top_k, top_p, W, SLOTS
            )
        else:
            row = tl.load(table_ptr + place)
            if (top_k > 0) & (top_k < W):
                count = top_k.to(tl.float64)
                cut = search_row(count, cut, logits_ptr, row, row_max, scale, W, 1, C, BLOCK)
                mass = weight_above(cut, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
            if top_p < 1:
                mass = top_p * mass
                cut = search_row(mass, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
            mass = weight_above(cut, cut, logits_ptr, row, row_max, scale, W, 0, C, BLOCK)
    tl.store(cut_ptr + place, cut)
    tl.store(mass_ptr + place, mass.to(tl.float32))


CUT = DirectKernel(filter_cut_kernel)


def launch_cut(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    logits: Tensor,
    table: Tensor,
    drafts: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    block: int,
) -> None:
    """Replace cut and mass of filtered rows; rows: maximum, mass, cut and flag."""
    row_max, mass, cut, wrong = rows
    chunks = found[3].shape[1]
    with torch.cuda.device_of(logits):
        CUT.launch(
            (len(row_max),),
            cut,
            mass,
            *found,
            logits,
            table,
            drafts,
            row_max,
            wrong,
            *sampling,
            drafts.shape[1],
            logits.shape[1],
            chunks,
            SLOTS=found[0].shape[1],
            CHUNKS=triton.next_power_of_2(chunks),
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
