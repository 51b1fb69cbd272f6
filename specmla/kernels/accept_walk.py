"""Accept, the pass of trees: which path stands, and the token after it; one program a request.

Children are tried as the pure rule does, and only those that the walk comes to: a refused child
costs one look at its parent's row, and at the q of those refused there, to know what mass is left.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from specmla.kernels.accept_left import draw_left, left_masses, test_child
from specmla.kernels.accept_prims import MATCH, exponent_scale, key_id
from specmla.kernels.direct import DirectKernel
from specmla.kernels.splitmix import ACCEPT, CORRECTION, TARGET, uniform

if TYPE_CHECKING:
    from torch import Tensor

NUM_WARPS = 8


@triton.jit(do_not_specialize=["K"])
def accept_walk_kernel(
    out_ptr,  # [B, 2 K + 3] int64: tokens, then -1; rows of the path, then -1; accepted, flag
    next_ptr,  # [B] int64
    end_ptr,  # [B] int64, last row of the path
    parent_ptr,  # [B, K] int64
    rank_ptr,  # [B, K] int64
    depth_ptr,  # [B, K] int64
    logits_ptr,  # [R, W]
    table_ptr,  # [B, K + 1] int64
    drafts_ptr,  # [B, K] int64
    q_ptr,  # [B, K, W] float32, if DENSE
    max_ptr,  # [B * (K + 1)] float32
    mass_ptr,  # [B * (K + 1)] float32
    cut_ptr,  # [B * (K + 1)] int64
    wrong_ptr,  # [B * (K + 1)] int32
    found_id_ptr,  # [B * (K + 1), SLOTS] int32, if FILTER
    number_ptr,  # [B * (K + 1)] int32, if FILTER
    temperature_ptr,  # [B] float32
    seed_ptr,  # [B] int64
    position_ptr,  # [B] int64
    K,
    W,
    C,
    RULE: tl.constexpr,
    DENSE: tl.constexpr,
    FILTER: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request; under every row of the path its children are tried by rank."""
    b, n = tl.program_id(0), tl.arange(0, WIDTH)
    SIZE: tl.constexpr = FEW if FILTER else BLOCK
    temperature = tl.load(temperature_ptr + b)
    scale, greedy = exponent_scale(temperature), temperature == 0
    seed, position = tl.load(seed_ptr + b), tl.load(position_ptr + b)
    there = tl.load(depth_ptr + b * K + n, mask=n < K, other=0) > 0
    parent = tl.load(parent_ptr + b * K + n, mask=there, other=-1).to(tl.int32)
    rank = tl.load(rank_ptr + b * K + n, mask=there, other=-1).to(tl.int32)
    draft = tl.load(drafts_ptr + b * K + n, mask=there, other=-1)
    refs = (b, logits_ptr, drafts_ptr, q_ptr, K, W, C)
    level, norm = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.float32)
    masses, none, whole = tl.zeros((CHUNKS,), tl.float64), position * 0, temperature * 0.0 + 1.0
    at, stand, tried, running, bits, mass, token = 0, 0, 0, 1, none, whole, none
    good = greedy
    for _ in range(K + 1):
        if running != 0:
            place = b * (K + 1) + at
            row = (
                tl.load(table_ptr + place),
                tl.load(max_ptr + place),
                tl.load(mass_ptr + place),
                tl.load(cut_ptr + place),
                scale,
            )
            number = 0 * at
            if FILTER:
                number = tl.load(number_ptr + place)
            held = (found_id_ptr, place.to(tl.int64) * SLOTS, number)
            node, stands, takes, more = 0 * at - 1, none != 0, none != 0, none != 0
            if RULE != MATCH:
                node = tl.max(tl.where((parent == at) & (rank == tried), n, -1), 0)
                u = uniform(seed, position, at + (tried + none << 31), ACCEPT)
                stands, takes = test_child(node, u, row, bits, norm, mass, refs, DENSE)
                more = node >= 0
            # Of a greedy row there is one id or nothing: nobody has to look what is left.
            if (takes | ((more == 0) & (bits == 0))) & (greedy == 0):
                if DENSE:
                    norm = tl.where(n == node, mass, norm)
                taken = bits | (takes.to(tl.int64) << tl.maximum(node, 0))
                if held[2] > 0:
                    found = left_masses(held, row, taken, norm, refs, DENSE, FILTER, CHUNKS, SIZE)
                else:
                    found = left_masses(held, row, taken, norm, refs, DENSE, False, CHUNKS, BLOCK)
                total = tl.sum(found, 0)
                if total != 0:  # else q covers what is left: rounding alone refused the child
                    bits, mass, masses = taken, total.to(tl.float32), found
            if more == 0:
                token = key_id(row[3]).to(tl.int64)
                if greedy == 0:
                    u = uniform(seed, position, 0, CORRECTION)
                    if RULE == MATCH:
                        u = uniform(seed, position + stand, 0, TARGET)
                    if held[2] > 0:
                        token, good = draw_left(
                            u, masses, held, row, bits, norm, refs, DENSE, FILTER, CHUNKS, SIZE
                        )
                    else:
                        token, good = draw_left(
                            u, masses, held, row, bits, norm, refs, DENSE, False, CHUNKS, BLOCK
                        )
            if RULE == MATCH:
                node = tl.min(tl.where((parent == at) & (draft == token), n, WIDTH), 0)
                stands = node < WIDTH
                more = stands
            running = more.to(tl.int32)
            tried += 1
            if stands:
                stand += 1
                level = tl.where(n == node, stand, level)
                at, tried, bits, mass = node + 1, 0, none, whole
    out, is_on = out_ptr + b * (2 * K + 3), level > 0
    tl.store(out + level - 1, draft, mask=is_on)
    tl.store(out + stand, token)
    tl.store(out + n, none - 1, mask=(n > stand) & (n <= K))
    tl.store(out + K + level, (n + 1).to(tl.int64), mask=is_on)
    tl.store(out + K + 1 + n, none - 1, mask=(n >= stand) & (n < K))
    wrong = tl.max(tl.load(wrong_ptr + b * (K + 1) + n, mask=n <= K, other=0), 0)
    tl.store(out + 2 * K + 1, stand)
    tl.store(out + 2 * K + 2, ((wrong != 0) | (good == 0)).to(tl.int64))
    tl.store(next_ptr + b, token)
    tl.store(end_ptr + b, at)


WALK = DirectKernel(accept_walk_kernel)


def launch_walk(
    out: tuple[Tensor, Tensor, Tensor],
    tree: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    held: tuple[Tensor | None, Tensor | None],
    request: tuple[Tensor, Tensor, Tensor],
    options: dict[str, int],
) -> None:
    """Decide and draw.

    Args:
        out: packed decisions [B, 2 K + 3], next tokens [B] and last rows [B].
        tree: parents, ranks and depths [B, K].
        inputs: logits, table, drafts and q.
        rows: maximum, mass, cut and flag of each row.
        held: ids and number of what is held, or None without filters.
        request: temperature, seed and position.
        options: constants of the kernel.
    """
    logits, _, drafts, _ = inputs
    chunks = triton.cdiv(logits.shape[1], options["BLOCK"])
    with torch.cuda.device_of(logits):
        WALK.launch(
            (drafts.shape[0],),
            *out,
            *tree,
            *inputs,
            *rows,
            *held,
            *request,
            drafts.shape[1],
            logits.shape[1],
            chunks,
            **options,
            CHUNKS=triton.next_power_of_2(max(chunks, options["SLOTS"] // options["FEW"])),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
