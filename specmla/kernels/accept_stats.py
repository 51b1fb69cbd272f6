"""Accept, first pass: maximum and sum of exponents of every chunk of every row, one read of all.

Of requests that are filtered, those of each group of ids too (`filter_groups`).
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import exponent_scale, load_logits
from specmla.kernels.direct import DirectKernel
from specmla.kernels.filter_groups import is_filtered

NUM_WARPS = 4


@triton.jit(do_not_specialize=["K"])
def accept_stats_kernel(
    part_max_ptr,  # [B * (K + 1), C] float32
    part_sum_ptr,  # [B * (K + 1), C] float32
    part_top_ptr,  # [B * (K + 1), C] int32, -1: the chunk holds NaN or +inf;
    # else the lowest id of the maximum if the request is greedy, else what is no id
    group_max_ptr,  # [B * (K + 1), C * BLOCK / GROUP] float32, if FILTER
    group_sum_ptr,  # [B * (K + 1), C * BLOCK / GROUP] float32, to the chunk's maximum
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    temperature_ptr,  # [B] float32
    top_k_ptr,  # [B] int64, if FILTER
    top_p_ptr,  # [B] float32
    min_p_ptr,  # [B] float32
    K,
    W,
    C,
    FILTER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one row; rows after a request's last draft repeat its last one and are left."""
    place, chunk = tl.program_id(0), tl.program_id(1)
    b, j = place // (K + 1), place % (K + 1)
    # All are asked for at once: what a program mostly does is wait.
    row, temperature = tl.load(table_ptr + place), tl.load(temperature_ptr + b)
    if tl.load(drafts_ptr + b * K + j - 1, mask=j > 0, other=0) < 0:
        return
    group = tl.arange(0, BLOCK // GROUP)
    ids = chunk * BLOCK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(logits_ptr, row, ids, W)
    scale = exponent_scale(temperature)
    group_max = tl.max(x, 1)
    top = tl.max(group_max, 0)
    floor = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((x - floor) * scale)
    group_sum = tl.sum(weight, 1)
    part_sum, first = tl.sum(group_sum, 0), 0 * chunk + 2147483647
    if temperature == 0:
        first = tl.min(tl.min(tl.where(x == top, ids, 2147483647), 1), 0)
    at = place * C + chunk
    tl.store(part_max_ptr + at, top)
    tl.store(part_sum_ptr + at, part_sum)
    # A number that is NaN or +inf makes the sum NaN, as nothing else does.
    tl.store(part_top_ptr + at, tl.where(part_sum != part_sum, -1, first))
    if FILTER:
        top_k, top_p = tl.load(top_k_ptr + b), tl.load(top_p_ptr + b)
        if is_filtered(temperature, top_k, top_p, tl.load(min_p_ptr + b), W):
            to = at.to(tl.int64) * (BLOCK // GROUP) + group
            tl.store(group_max_ptr + to, group_max)
            tl.store(group_sum_ptr + to, group_sum)


STATS = DirectKernel(accept_stats_kernel)


def launch_stats(
    parts: tuple[Tensor, Tensor, Tensor],
    groups: tuple[Tensor | None, Tensor | None],
    logits: Tensor,
    table: Tensor,
    drafts: Tensor,
    sampling: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    block: int,
    group: int,
) -> None:
    """Fill the parts [B * (K + 1), C] of logits [R, W], contiguous.

    Args:
        parts: maximum, sum and first id of chunks.
        groups: maximum and sum of groups of ids, or None where nothing is filtered.
        logits, table, drafts: of the step.
        sampling: temperature; top_k, top_p and min_p, or None as the groups.
        block, group: ids of a chunk, and of a group.
    """
    (b, rows), chunks = table.shape, parts[0].shape[1]
    with torch.cuda.device_of(logits):
        STATS.launch(
            (b * rows, chunks),
            *parts,
            *groups,
            logits,
            table,
            drafts,
            *sampling,
            rows - 1,
            logits.shape[1],
            chunks,
            FILTER=int(groups[0] is not None),
            GROUP=group,
            BLOCK=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
