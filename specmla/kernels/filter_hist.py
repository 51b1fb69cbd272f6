"""Filter, first pass: how many logits of each chunk lie how far below the row's maximum."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import exponent_scale, load_logits
from specmla.kernels.direct import DirectKernel

NUM_WARPS = 4
BINS = tl.constexpr(64)
BITS_A_BIN = tl.constexpr(0.5)
"""Width of a bin in base-2 exponents: what is 31.5 bits below the maximum is in the last one."""


@triton.jit
def is_searched(temperature, top_k, top_p, W):
    """Whether a request keeps the top ids only, by number or mass."""
    return (temperature > 0) & (((top_k > 0) & (top_k < W)) | (top_p < 1))


@triton.jit(do_not_specialize=["K"])
def filter_hist_kernel(
    hist_ptr,  # [B * (K + 1), C, BINS] int32
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    max_ptr,  # [B * (K + 1)] float32
    temperature_ptr,  # [B] float32
    top_k_ptr,  # [B] int64
    top_p_ptr,  # [B] float32
    K,
    W,
    C,
    BLOCK: tl.constexpr,
):
    """One chunk of one row; ids outside the vocabulary count in the last bin."""
    place, chunk = tl.program_id(0), tl.program_id(1)
    b, j = place // (K + 1), place % (K + 1)
    temperature = tl.load(temperature_ptr + b)
    searched = is_searched(temperature, tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), W)
    if (tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0) | (searched == 0):
        return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, tl.load(table_ptr + place), ids, W)
    below = (tl.load(max_ptr + place) - x) * exponent_scale(temperature)
    inner = below < (BINS - 1) * BITS_A_BIN  # NaN and what is far below are not
    at = tl.where(inner, below / BITS_A_BIN, BINS - 1.0).to(tl.int32)
    counts = tl.histogram(at, BINS)
    out = (place.to(tl.int64) * C + chunk) * BINS + tl.arange(0, BINS)
    tl.store(hist_ptr + out, counts)


HIST = DirectKernel(filter_hist_kernel)


def launch_hist(
    hist: Tensor,
    logits: Tensor,
    table: Tensor,
    drafts: Tensor,
    row_max: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor],
    block: int,
) -> None:
    """Fill the histograms of rows that are searched; sampling: temperature, top_k, top_p [B]."""
    with torch.cuda.device_of(logits):
        HIST.launch(
            hist.shape[:2],
            hist,
            logits,
            table,
            drafts,
            row_max,
            *sampling,
            drafts.shape[1],
            logits.shape[1],
            hist.shape[1],
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
