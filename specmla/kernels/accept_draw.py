"""Accept, last pass: how many drafts stand, and the token after them."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.accept_mass import drawn_from
from specmla.kernels.accept_prims import (
    BLOCK_RULE,
    KEEP_ALL,
    MATCH,
    TOKEN_LEVEL,
    draft_ratios,
    exponent_scale,
    first_refusal,
    key_id,
    last_pass,
    load_logits,
    reach,
    weigh,
)
from specmla.kernels.direct import DirectKernel
from specmla.kernels.splitmix import CORRECTION, TARGET, uniform

NUM_WARPS = 8


@triton.jit
def pick(weight, fraction):
    """Give the index into `weight` [N] at a fraction of its sum, by sums of integers."""
    # 61 bits: the weights sum to 1 at most, but for rounding.
    whole = (weight * 2305843009213693952.0).to(tl.int64)
    total = tl.sum(whole, 0)
    target = tl.minimum((fraction * total.to(tl.float64)).to(tl.int64), total - 1)
    return tl.sum((tl.cumsum(whole, 0) <= target).to(tl.int32), 0)


@triton.jit
def draw_row(
    b, j, u, part, residual, mass_at, part_max_ptr, part_sum_ptr, logits_ptr, table_ptr, drafts_ptr,
    q_ptr, max_ptr, mass_ptr, cut_ptr, scale, greedy, K, W, C,
    FILTER: tl.constexpr, DENSE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token of row j: give it, and whether there was something to draw from.

    A greedy request takes the one id that its row keeps, whatever q was.
    """
    place = b * (K + 1) + j
    row, lane = tl.load(table_ptr + place), tl.arange(0, BLOCK)
    row_max, row_mass = tl.load(max_ptr + place), tl.load(mass_ptr + place)
    cut = tl.load(cut_ptr + place)
    own = tl.load(drafts_ptr + b * K + j, mask=j < K, other=-1)
    chunks = tl.arange(0, CHUNKS)
    # By the request alone, not by what its batch mates are: they must not change its rounding.
    summed = cut == cut if DENSE else cut != KEEP_ALL
    mass = tl.zeros((CHUNKS,), tl.float64)
    if FILTER or DENSE:
        mass += tl.load(mass_at + chunks, mask=chunks < tl.where(summed, C, 0), other=0.0)
    if not DENSE:
        live = chunks < tl.where(summed, 0, C)
        top = tl.load(part_max_ptr + place * C + chunks, mask=live, other=float("-inf"))
        kept = tl.load(part_sum_ptr + place * C + chunks, mask=live, other=0.0)
        kept = part * (kept * tl.exp2((top - row_max) * scale) / row_mass)
        mass += tl.where(top > float("-inf"), kept, 0.0)
        if residual & (own < W) & (cut == KEEP_ALL):
            ids = own // BLOCK * BLOCK + lane
            x = load_logits(logits_ptr, row, ids, W)
            rest = drawn_from(
                ids, x, row_max, row_mass, scale, cut, part, b, j, own, residual, q_ptr, K, W,
                FILTER, DENSE,
            )  # fmt: skip
            mass = tl.where(chunks == own // BLOCK, tl.sum(rest, 0).to(tl.float64), mass)
    total = tl.sum(mass, 0)
    residual = residual & (total != 0)
    if (total == 0) & (greedy == 0):  # of a greedy row nobody has summed anything
        # Rounding refused a draft that p equals q for: the token comes from p.
        for chunk in range(C):
            ids = chunk * BLOCK + lane
            w = weigh(load_logits(logits_ptr, row, ids, W), ids, row_max, scale, cut, FILTER)
            mass = tl.where(chunks == chunk, tl.sum(w / row_mass, 0).to(tl.float64), mass)
        total = tl.sum(mass, 0)
    below = tl.cumsum(mass, 0)
    chunk = tl.sum((below <= u * total).to(tl.int32), 0)
    chunk = tl.minimum(chunk, tl.max(tl.where(mass > 0, chunks, 0), 0))
    mine = tl.sum(tl.where(chunks == chunk, mass, 0.0), 0)
    start = tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)
    fraction = tl.maximum((u * total - start) / tl.where(greedy, 1.0, mine), 0.0)
    ids = chunk * BLOCK + lane
    x = load_logits(logits_ptr, row, ids, W)
    weight = drawn_from(
        ids, x, row_max, row_mass, scale, cut, part, b, j, own, residual, q_ptr, K, W,
        FILTER, DENSE,
    )  # fmt: skip
    token = chunk * BLOCK + pick(weight, fraction)
    token = tl.minimum(tl.maximum(token, 0), W - 1)
    top = key_id(tl.load(cut_ptr + place))
    return tl.where(greedy, top, token), greedy | ((total > 0) & (total < 1.0e30))


@triton.jit(do_not_specialize=["K"])
def accept_draw_kernel(
    out_ptr,  # [B, K + 4] int64: tokens, then -1; drafts, accepted ones, flag
    next_ptr,  # [B] int64
    chunk_mass_ptr,  # [B, PLACES, C] float32, if FILTER or DENSE
    part_max_ptr,  # [B * (K + 1), C] float32
    part_sum_ptr,  # [B * (K + 1), C] float32
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
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request."""
    b = tl.program_id(0)
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
        if FILTER or DENSE:
            chunks = tl.arange(0, CHUNKS)
            cut = tl.load(cut_ptr + b * (K + 1))
            summed = cut == cut if DENSE else cut != KEEP_ALL
            use = (n < tl.where(summed, count, 0))[:, None] & (chunks < C)[None, :]
            at = masses + n[:, None] * C + chunks[None, :]
            rest = tl.where(summed, tl.sum(tl.load(at, mask=use, other=0.0), 1), rest)
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
                    b, j, u, 1.0, j < 0, masses + j * C, part_max_ptr, part_sum_ptr, logits_ptr,
                    table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale, greedy, K, W,
                    C, FILTER, DENSE, CHUNKS, BLOCK,
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
            b, stand, u, part, stand < count, at, part_max_ptr, part_sum_ptr, logits_ptr,
            table_ptr, drafts_ptr, q_ptr, max_ptr, mass_ptr, cut_ptr, scale, greedy, K, W, C,
            FILTER, DENSE, CHUNKS, BLOCK,
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
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    request: tuple[Tensor, Tensor, Tensor],
    options: dict[str, int],
) -> None:
    """Decide and draw.

    Args:
        out: packed decisions [B, K + 4] and next tokens [B].
        masses: [B, PLACES, C], or None: they follow from the parts.
        parts: maximum and sum of each chunk.
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
        )
