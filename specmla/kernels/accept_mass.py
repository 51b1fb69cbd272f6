"""Accept, third pass: the mass of each chunk of what a token may be drawn from.

Only where that mass does not follow from the first pass: with dense draft distributions, or where
ids were cut.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_prims import (
    BLOCK_RULE,
    KEEP_ALL,
    MATCH,
    TOKEN_LEVEL,
    draft_ratios,
    exponent_scale,
    first_refusal,
    load_logits,
    reach,
    weigh,
)
from specmla.kernels.direct import DirectKernel

NUM_WARPS = 4


@triton.jit
def drawn_from(
    ids, x, row_max, mass, scale, cut, part, b, j, draft, is_residual, q_ptr, K, W,
    FILTER: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Give what a token is drawn from, for ids [N] of row j: part * p, less q where it is residual.

    part is P_j of block verification, else 1. draft: the id that one-hot q is at.
    """
    p = part * (weigh(x, ids, row_max, scale, cut, FILTER) / mass)
    if DENSE:
        at = q_ptr + (b * K + j).to(tl.int64) * W + ids
        q = tl.load(at, mask=ids < tl.where(is_residual, W, 0), other=0.0)
        rest = p - q
        return tl.where(rest < 0, 0.0, rest)  # NaN of q stays, and flags the row
    return tl.where(ids == tl.where(is_residual, draft, -1), 0.0, p)


@triton.jit(do_not_specialize=["K"])
def accept_mass_kernel(
    out_ptr,  # [B, PLACES, C] float32
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    q_ptr,  # [B, K, W] float32, if DENSE
    max_ptr,  # [B * (K + 1)] float32
    mass_ptr,  # [B * (K + 1)] float32
    cut_ptr,  # [B * (K + 1)] int64
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    K,
    W,
    C,
    PLACES,  # 1 for TOKEN_LEVEL: the place where a request's run ends; else K + 1, all of them
    RULE: tl.constexpr,
    FILTER: tl.constexpr,
    DENSE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one row; of greedy requests, and rows that follow from the parts, nothing."""
    b, j, chunk = tl.program_id(0) // PLACES, tl.program_id(0) % PLACES, tl.program_id(1)
    temperature = tl.load(temperature_ptr + b)
    if temperature == 0:
        return
    scale = exponent_scale(temperature)
    # For BLOCK_RULE the ratio before each place: P_j is the reach of the drafts before it.
    n = tl.arange(0, WIDTH) - (1 if RULE == BLOCK_RULE else 0)
    ratio, _, count = draft_ratios(
        b, n, logits_ptr, table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale, K, W,
        DENSE,
    )  # fmt: skip
    part = 1.0
    if RULE == TOKEN_LEVEL:
        seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
        j = first_refusal(ratio, n, count, seed, position)
    if RULE == BLOCK_RULE:
        reached = reach(tl.where(n < 0, 1.0, ratio))
        part = tl.where(j < count, tl.sum(tl.where(n == j - 1, reached, 0.0), 0), 1.0)
    if j > count:
        return
    place = b * (K + 1) + j
    cut = tl.load(cut_ptr + place)
    if (cut == KEEP_ALL) & (DENSE == 0):
        return
    residual = j < (0 if RULE == MATCH else count)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, tl.load(table_ptr + place), ids, W)
    own = tl.load(drafts_ptr + b * K + j, mask=j < K, other=-1)
    weight = drawn_from(
        ids, x, tl.load(max_ptr + place), tl.load(mass_ptr + place), scale, cut, part, b, j, own,
        residual, q_ptr, K, W, FILTER, DENSE,
    )  # fmt: skip
    at = tl.program_id(0) * C + chunk
    tl.store(out_ptr + at, tl.sum(weight, 0))


MASS = DirectKernel(accept_mass_kernel)


def launch_mass(
    out: Tensor,
    logits: Tensor,
    table: Tensor,
    drafts: Tensor,
    q: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor],
    request: tuple[Tensor, Tensor, Tensor],
    options: dict[str, int],
) -> None:
    """Fill the masses; rows: maximum, mass and cut; request: temperature, seed, position."""
    b, places, chunks = out.shape
    with torch.cuda.device_of(logits):
        MASS.launch(
            (b * places, chunks),
            out,
            logits,
            table,
            drafts,
            q,
            *rows,
            *request,
            drafts.shape[1],
            logits.shape[1],
            chunks,
            places,
            **options,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
