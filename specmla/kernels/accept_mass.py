"""Accept, third pass: the mass of each chunk of what a token may be drawn from, with dense q.

Where q is one-hot that mass follows from the first pass, and where ids are held from these.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_held import held_mass
from specmla.kernels.accept_prims import (
    BLOCK_RULE,
    TOKEN_LEVEL,
    draft_ratios,
    drawn_from,
    exponent_scale,
    first_refusal,
    load_logits,
    reach,
)
from specmla.kernels.direct import DirectKernel

NUM_WARPS = 4


@triton.jit(do_not_specialize=["K"])
def accept_mass_kernel(
    out_ptr,  # [B, PLACES, C] float32
    found_ptr,  # [B * (K + 1), SLOTS] float32, if FILTER
    found_id_ptr,  # [B * (K + 1), SLOTS] int32, if FILTER
    number_ptr,  # [B * (K + 1)] int32, if FILTER
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    q_ptr,  # [B, K, W] float32
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
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one row, nothing of greedy requests; where ids are held, all in chunk 0."""
    b, j, chunk = tl.program_id(0) // PLACES, tl.program_id(0) % PLACES, tl.program_id(1)
    temperature = tl.load(temperature_ptr + b)
    if temperature == 0:
        return
    scale = exponent_scale(temperature)
    # For BLOCK_RULE the ratio before each place: P_j is the reach of the drafts before it.
    n = tl.arange(0, WIDTH) - (1 if RULE == BLOCK_RULE else 0)
    ratio, _, count = draft_ratios(
        b, n, logits_ptr, table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale, K, W,
        True,
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
    row_max, mass, cut = (
        tl.load(max_ptr + place),
        tl.load(mass_ptr + place),
        tl.load(cut_ptr + place),
    )
    own, residual = tl.load(drafts_ptr + b * K + j, mask=j < K, other=-1), j < count
    to = out_ptr + tl.program_id(0) * C + chunk
    if FILTER:
        number = tl.load(number_ptr + place)
        if number > 0:
            # The draw of TOKEN_LEVEL looks at what is held, not at its mass.
            if RULE == BLOCK_RULE:
                held, row = (found_ptr, found_id_ptr), (row_max, mass, cut, scale)
                drawn = (part, b, j, own, residual, q_ptr, K, W)
                number = tl.where(chunk == 0, number, 0)
                total, _whole = held_mass(held, place, number, row, drawn, True, SLOTS, FEW)
                tl.store(to, total.to(tl.float32))
            return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr, tl.load(table_ptr + place), ids, W)
    weight = drawn_from(
        ids, x, row_max, mass, scale, cut, part, b, j, own, residual, q_ptr, K, W, FILTER, True
    )
    tl.store(to, tl.sum(weight, 0))


MASS = DirectKernel(accept_mass_kernel)


def launch_mass(
    out: Tensor,
    held: tuple[Tensor | None, Tensor | None, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor, Tensor],
    request: tuple[Tensor, Tensor, Tensor],
    options: dict[str, int],
) -> None:
    """Fill the masses [B, PLACES, C].

    Args:
        out: masses.
        held: logits, ids and number of what is held, or None without filters.
        inputs: logits, table, drafts and dense q.
        rows: maximum, mass and cut of each row.
        request: temperature, seed and position.
        options: constants of the kernel.
    """
    b, places, chunks = out.shape
    with torch.cuda.device_of(out):
        MASS.launch(
            (b * places, chunks),
            out,
            *held,
            *inputs,
            *rows,
            *request,
            inputs[2].shape[1],
            inputs[0].shape[1],
            chunks,
            places,
            **options,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
