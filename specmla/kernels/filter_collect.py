"""Filter, second pass: the ids that may be kept, and the mass that min-p keeps."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import exponent_scale, load_logits
from specmla.kernels.direct import DirectKernel
from specmla.kernels.filter_hist import BINS, BITS_A_BIN, is_searched

NUM_WARPS = 8
SLACK = tl.constexpr(0.999)
"""Of the mass that top-p may leave out, the part used: float32 sums round by far less."""


@triton.jit
def last_bin(counts, top_k, top_p, mass, W):
    """Give the bin down to which ids are collected, so that none is missed that may be kept.

    For top-k the one that holds the k-th id. For top-p the one below which at most 1 - top_p of the
    mass can lie, if every id of a bin weighed as much as its upper end allows; top-p after top-k or
    min-p keeps no more than that.
    """
    bins = tl.arange(0, BINS)
    number = tl.cumsum(counts, 0)
    upper = counts.to(tl.float32) * tl.exp2(-bins.to(tl.float32) * BITS_A_BIN)
    left = tl.sum(upper, 0) - tl.cumsum(upper, 0)
    allowed = (1.0 - top_p) * mass * SLACK
    by_number = (top_k > 0) & (top_k < W)
    short = tl.where(by_number, number < top_k, left > allowed)
    return tl.minimum(tl.sum(short.to(tl.int32), 0), BINS - 1)


@triton.jit(do_not_specialize=["K"])
def filter_collect_kernel(
    found_ptr,  # [B * (K + 1), SLOTS] float32, logits
    found_id_ptr,  # [B * (K + 1), SLOTS] int32
    number_ptr,  # [B * (K + 1)] int32, how many there are; more than SLOTS: they are not all there
    kept_ptr,  # [B * (K + 1), C] float32, mass of each chunk that min-p keeps
    hist_ptr,  # [B * (K + 1), C, BINS] int32
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    max_ptr,  # [B * (K + 1)] float32
    mass_ptr,  # [B * (K + 1)] float32
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
    """One chunk of one row: its ids stand behind those of the chunks before it, in their order."""
    place, chunk = tl.program_id(0), tl.program_id(1)
    b, j = place // (K + 1), place % (K + 1)
    if tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0:
        return
    temperature, min_p = tl.load(temperature_ptr + b), tl.load(min_p_ptr + b)
    top_k, top_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, tl.load(table_ptr + place), ids, W)
    row_max, scale = tl.load(max_ptr + place), exponent_scale(temperature)
    raised = (x - row_max) * scale
    kept = tl.where(raised >= tl.log2(min_p), tl.exp2(raised), 0.0)
    tl.store(kept_ptr + place * C + chunk, tl.sum(kept, 0))
    if is_searched(temperature, top_k, top_p, W) == 0:
        return
    chunks, bins = tl.arange(0, CHUNKS), tl.arange(0, BINS)
    at = (place.to(tl.int64) * C + chunks)[:, None] * BINS + bins[None, :]
    hist = tl.load(hist_ptr + at, mask=(chunks < C)[:, None], other=0)
    end = last_bin(tl.sum(hist, 0), top_k, top_p, tl.load(mass_ptr + place), W)
    by_chunk = tl.sum(tl.where(bins[None, :] <= end, hist, 0), 1)
    start = tl.sum(tl.where(chunks < chunk, by_chunk, 0), 0)
    # The last bin has no lower end: such a row is searched as a whole.
    total = tl.where(end == BINS - 1, SLOTS + 1, tl.sum(by_chunk, 0))
    below = (row_max - x) * scale
    inner = below < (BINS - 1) * BITS_A_BIN
    mine = inner & (tl.where(inner, below / BITS_A_BIN, BINS - 1.0).to(tl.int32) <= end)
    slot = start + tl.cumsum(mine.to(tl.int32), 0) - 1
    use = mine & (slot < tl.where(total <= SLOTS, SLOTS, 0))
    to = place.to(tl.int64) * SLOTS + slot
    tl.store(found_ptr + to, x, mask=use)
    tl.store(found_id_ptr + to, ids, mask=use)
    tl.store(number_ptr + place, total, mask=chunk == 0)


COLLECT = DirectKernel(filter_collect_kernel)


def launch_collect(
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    hist: Tensor,
    logits: Tensor,
    table: Tensor,
    drafts: Tensor,
    rows: tuple[Tensor, Tensor],
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    block: int,
) -> None:
    """Fill logits, ids, number and min-p mass; rows: maximum and mass; sampling: temperature,
    top_k, top_p, min_p."""
    chunks = hist.shape[1]
    with torch.cuda.device_of(logits):
        COLLECT.launch(
            hist.shape[:2],
            *found,
            hist,
            logits,
            table,
            drafts,
            *rows,
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
