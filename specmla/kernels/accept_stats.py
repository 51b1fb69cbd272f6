"""Accept, first pass: maximum and sum of exponents of every chunk of every row, one read of all."""

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


@triton.jit(do_not_specialize=["K"])
def accept_stats_kernel(
    part_max_ptr,  # [B * (K + 1), C] float32
    part_sum_ptr,  # [B * (K + 1), C] float32
    part_top_ptr,  # [B * (K + 1), C] int32, lowest id of the maximum; -1: the chunk holds NaN, +inf
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    temperature_ptr,  # [B] float32
    K,
    W,
    C,
    BLOCK: tl.constexpr,
):
    """One chunk of one row; rows after a request's last draft repeat its last one and are left."""
    place, chunk = tl.program_id(0), tl.program_id(1)
    b, j = place // (K + 1), place % (K + 1)
    if tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0:
        return
    row = tl.load(table_ptr + place)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, row, ids, W)
    scale = exponent_scale(tl.load(temperature_ptr + b))
    top = tl.max(x, 0)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((x - floor) * scale), 0)
    first = tl.min(tl.where(x == top, ids, 2147483647), 0)
    wrong = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    at = place * C + chunk
    tl.store(part_max_ptr + at, top)
    tl.store(part_sum_ptr + at, total)
    tl.store(part_top_ptr + at, tl.where(wrong > 0, -1, first))


STATS = DirectKernel(accept_stats_kernel)


def launch_stats(
    parts: tuple[Tensor, Tensor, Tensor],
    logits: Tensor,
    table: Tensor,
    drafts: Tensor,
    temperature: Tensor,
    block: int,
) -> None:
    """Fill the parts [B * (K + 1), C] of logits [R, W], contiguous."""
    (b, rows), chunks = table.shape, parts[0].shape[1]
    with torch.cuda.device_of(logits):
        STATS.launch(
            (b * rows, chunks),
            *parts,
            logits,
            table,
            drafts,
            temperature,
            rows - 1,
            logits.shape[1],
            chunks,
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
