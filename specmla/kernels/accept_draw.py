"""Accept, last pass: how many drafts stand, and the token after them."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_chunks import draw_all
from specmla.kernels.accept_held import draw_held
from specmla.kernels.accept_prims import (
    BLOCK_RULE,
    MATCH,
    TOKEN_LEVEL,
    draft_ratios,
    exponent_scale,
    first_refusal,
    key_id,
    last_pass,
    reach,
)
from specmla.kernels.direct import DirectKernel
from specmla.kernels.splitmix import CORRECTION, TARGET, uniform

NUM_WARPS = 8
OPTIONS = {} if torch.version.hip else {"maxnreg": 192}
"""Without it the compiler keeps to 80 registers, and spills two of them."""


@triton.jit
def draw_row(
    b, j, u, part, residual, mass_at, parts, held, inputs, rows, scale, greedy, K, W, C,
    FILTER: tl.constexpr, DENSE: tl.constexpr, SLOTS: tl.constexpr, FEW: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token of row j: give it, and whether there was something to draw from.

    A greedy request takes the one id that its row keeps, whatever q was.
    """
    place = b * (K + 1) + j
    cut = tl.load(rows[2] + place)
    row = (tl.load(rows[0] + place), tl.load(rows[1] + place), cut, scale)
    own = tl.load(inputs[2] + b * K + j, mask=j < K, other=-1)
    refs = (inputs[0], tl.load(inputs[1] + place), C)
    drawn = (part, b, j, own, residual, inputs[3], K, W)
    token, good = key_id(cut), greedy
    if greedy == 0:
        if FILTER:
            number = tl.load(held[2] + place)
            if number > 0:
                token, good = draw_held(u, held, place, number, row, drawn, DENSE, SLOTS, FEW)
            else:
                token, good = draw_all(
                    u, mass_at, parts, place, row, refs, drawn, True, DENSE, CHUNKS, BLOCK
                )
        else:
            token, good = draw_all(
                u, mass_at, parts, place, row, refs, drawn, False, DENSE, CHUNKS, BLOCK
            )
    return tl.minimum(tl.maximum(token, 0), W - 1), good


@triton.jit(do_not_specialize=["K"])
def accept_draw_kernel(
    out_ptr,  # [B, K + 4] int64: tokens, then -1; drafts, accepted ones, flag
    next_ptr,  # [B] int64
    chunk_mass_ptr,  # [B, PLACES, C] float32, if DENSE
    part_max_ptr,  # [B * (K + 1), C] float32
    part_sum_ptr,  # [B * (K + 1), C] float32
    found_ptr,  # [B * (K + 1), SLOTS] float32, if FILTER
    found_id_ptr,  # [B * (K + 1), SLOTS] int32, if FILTER
    number_ptr,  # [B * (K + 1)] int32, if FILTER
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    q_ptr,  # [B, K, W] float32, if DENSE
    max_ptr,  # [B * (K + 1)] float32
    mass_ptr,  # [B * (K + 1)] float32
    cut_ptr,  # [B * (K + 1)] int64
    wrong_ptr,  # [B * (K + 1)] int32
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    K,
    W,
    C,
    PLACES,
    RULE: tl.constexpr,
    FILTER: tl.constexpr,
    DENSE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request."""
    b = tl.program_id(0)
    parts, held = (part_max_ptr, part_sum_ptr), (found_ptr, found_id_ptr, number_ptr)
    inputs, rows = (logits_ptr, table_ptr, drafts_ptr, q_ptr), (max_ptr, mass_ptr, cut_ptr)
    temperature = tl.load(temperature_ptr + b)
    scale, greedy = exponent_scale(temperature), temperature == 0
    seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
    n = tl.arange(0, WIDTH)
    ratio, draft, count = draft_ratios(
        b, n, logits_ptr, table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale, K, W,
        DENSE,
    )  # fmt: skip
    masses = chunk_mass_ptr + b * PLACES * C
    part = 1.0
    stand = 0
    if RULE == TOKEN_LEVEL:
        stand = first_refusal(ratio, n, count, seed, position)
    if RULE == BLOCK_RULE:
        before, _, _ = draft_ratios(
            b, n - 1, logits_ptr, table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale,
            K, W, DENSE,
        )  # fmt: skip
        before = reach(tl.where(n == 0, 1.0, before))
        rest = before * tl.maximum(1.0 - ratio, 0.0)
        if DENSE:
            chunks = tl.arange(0, CHUNKS)
            use = (n < count)[:, None] & (chunks < C)[None, :]
            at = masses + n[:, None] * C + chunks[None, :]
            rest = tl.sum(tl.load(at, mask=use, other=0.0), 1)
        rest = tl.where(greedy, 0.0, rest)  # its P is 0 or 1, and nobody has summed the rest
        stand = last_pass(before, rest, n, count, seed, position)
        part = tl.sum(tl.where(n == stand, before, 0.0), 0)
    token, good = 0, count >= 0
    if RULE == MATCH:
        running = 1
        for j in range(K + 1):
            if running & (j <= count):
                u = uniform(seed, position + j, 0, TARGET)
                drawn, good = draw_row(
                    b, j, u, 1.0, (b * 0) != 0, masses, parts, held, inputs, rows, scale, greedy,
                    K, W, C, FILTER, DENSE, SLOTS, FEW, CHUNKS, BLOCK,
                )  # fmt: skip
                token = drawn
                own = tl.load(drafts_ptr + b * K + j, mask=j < count, other=-1)
                running = (own == drawn).to(tl.int32)
                stand += running
    else:
        u = uniform(seed, position, 0, CORRECTION)
        at = masses + (stand * C if RULE == BLOCK_RULE else 0)
        part = tl.where(stand < count, part, 1.0)
        token, good = draw_row(
            b, stand, u, part, stand < count, at, parts, held, inputs, rows, scale, greedy, K, W, C,
            FILTER, DENSE, SLOTS, FEW, CHUNKS, BLOCK,
        )  # fmt: skip
    wrong = tl.max(tl.load(wrong_ptr + b * (K + 1) + n, mask=n <= count, other=0), 0)
    out = out_ptr + b * (K + 4)
    kept = tl.where(n < stand, draft, tl.where(n == stand, token, -1))
    tl.store(out + n, kept.to(tl.int64), mask=n <= K)
    tl.store(out + K + 1, count.to(tl.int64))
    tl.store(out + K + 2, stand)
    tl.store(out + K + 3, ((wrong != 0) | (good == 0)).to(tl.int64))
    tl.store(next_ptr + b, token)


DRAW = DirectKernel(accept_draw_kernel)


def launch_draw(
    out: tuple[Tensor, Tensor],
    masses: Tensor | None,
    parts: tuple[Tensor, Tensor],
    held: tuple[Tensor | None, Tensor | None, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    request: tuple[Tensor, Tensor, Tensor],
    options: dict[str, int],
) -> None:
    """Decide and draw.

    Args:
        out: packed decisions [B, K + 4] and next tokens [B].
        masses: [B, PLACES, C] with dense q, else None.
        parts: maximum and sum of each chunk.
        held: logits, ids and number of what is held, or None without filters.
        inputs: logits, table, drafts and q.
        rows: maximum, mass, cut and flag of each row.
        request: temperature, seed and position.
        options: constants of the kernel.
    """
    logits, _, drafts, _ = inputs
    chunks = parts[0].shape[1]
    with torch.cuda.device_of(logits):
        DRAW.launch(
            (drafts.shape[0],),
            *out,
            parts[0] if masses is None else masses,  # not read in the first case
            *parts,
            *held,
            *inputs,
            *rows,
            *request,
            drafts.shape[1],
            logits.shape[1],
            chunks,
            1 if masses is None else masses.shape[1],
            **options,
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **OPTIONS,
        )
