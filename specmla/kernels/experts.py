"""Linear maps of routed experts: pairs (token, expert) sorted by expert, one launch for all.

A tile is BLOCK_M pairs of one expert at most. Which pairs those are comes from tables on the
device, so the launch is sized by bounds alone and a captured one follows its routing. Experts are
reached by their distance from the first one's weight: their memory stays where it is.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel

BLOCK_N = 64
FEW_PAIRS, MANY_PAIRS = 16, 32
"""Pairs of a tile: the larger once experts have as many on average, or if one serves all."""
NUM_WARPS, NUM_STAGES = 8, 2
"""With 4 warps, or 64 pairs, a tile of two maps spills."""


def inputs_of_step(itemsize: int) -> int:
    """Give BLOCK_K: of float32, 32 spill in the larger tile of two maps."""
    return 16 if itemsize == 4 else 64


class ExpertTiles(NamedTuple):
    """Where the tiles of a step lie.

    Attributes:
        expert, first, rows: [tiles] int64, expert, first sorted pair and pairs of each tile; 0 rows
            for tiles that are left over.
        block: BLOCK_M.
    """

    expert: Tensor
    first: Tensor
    rows: Tensor
    block: int


def make_tiles(chosen: Tensor, num_experts: int, block: int | None = None) -> ExpertTiles:
    """Cut the pairs of each expert into tiles; nothing is read back.

    Args:
        chosen: [P] int64, the expert of each pair, in any order.
        num_experts: E.
        block: pairs of a tile; by their number if None.
    """
    num_pairs = chosen.shape[0]
    if block is None:
        block = MANY_PAIRS if num_pairs >= MANY_PAIRS * num_experts else FEW_PAIRS
    counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    tiles = (counts + (block - 1)).div(block, rounding_mode="floor")
    ends = tiles.cumsum(0)
    # Each expert that is hit has one tile that is not full, at most.
    most = num_pairs // block + min(num_experts, num_pairs)
    tile = torch.arange(most, device=chosen.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp_(max=num_experts - 1)
    index = tile - (ends - tiles)[expert]
    first = (counts.cumsum(0) - counts)[expert] + index * block
    rows = (counts[expert] - index * block).clamp_(0, block)
    return ExpertTiles(expert, first, rows, block)


@triton.jit(
    do_not_specialize_on_alignment=["source_ptr", "target_ptr", "expert_ptr", "first_ptr"],
)
def experts_kernel(
    out_ptr,  # [*, N]
    x_ptr,  # [*, K]
    weight_ptr,  # [N, K] of the first expert
    other_ptr,  # the same of a second map; unused unless GATED
    offset_ptr,  # [E] int64, distance of each expert's weight
    other_offset_ptr,
    source_ptr,  # [P] int64, row of x of each sorted pair
    target_ptr,  # [P] int64, row of out
    expert_ptr,
    first_ptr,
    rows_ptr,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,  # silu(x W^T) * (x W'^T), else x W^T
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of pairs and BLOCK_N outputs."""
    tile = tl.program_id(0)
    rows = tl.load(rows_ptr + tile)
    if rows <= 0:
        return
    expert, m = tl.load(expert_ptr + tile), tl.arange(0, BLOCK_M)
    live, pair = m < rows, tl.load(first_ptr + tile) + m
    source = tl.load(source_ptr + pair, mask=live, other=0)
    target = tl.load(target_ptr + pair, mask=live, other=0)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = (x_ptr + source * stride_x)[:, None]
    at = tl.multiple_of(tl.load(offset_ptr + expert), ALIGN)
    weight_at = (weight_ptr + at + n * K)[None, :]
    if GATED:
        at = tl.multiple_of(tl.load(other_offset_ptr + expert), ALIGN)
        other_at = (other_ptr + at + n * K)[None, :]
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        held = (k < K)[:, None] & (n < N)[None, :]
        weight = tl.load(weight_at + k[:, None], mask=held, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
        if GATED:
            weight = tl.load(other_at + k[:, None], mask=held, other=0.0)
            up = tl.dot(x, weight, up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    to = (out_ptr + target * N)[:, None] + n[None, :]
    mask = live[:, None] & (n < N)[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mask)


EXPERTS = DirectKernel(experts_kernel)


class ExpertWeights(NamedTuple):
    """One linear map of all experts, where their weights lie.

    Attributes:
        first: [N, K] contiguous, expert 0.
        offsets: [E] int64 on the device, distances in elements. align: divides all of them.
    """

    first: Tensor
    offsets: Tensor
    align: int


def experts_linear(
    x: Tensor,
    weights: ExpertWeights,
    gated: ExpertWeights | None,
    source: Tensor,
    target: Tensor,
    tiles: ExpertTiles,
) -> Tensor:
    """Map rows of x by each pair's expert: `x W^T`, or `silu(x W^T) * (x W'^T)` with `gated`.

    Args:
        x: [*, K], last stride 1.
        weights, gated: of all experts, the dtype of x.
        source, target: [P] int64, row of x and row of the result of each sorted pair.
        tiles: of the same pairs.

    Returns:
        [P, N], each row written once.
    """
    width, inner = weights.first.shape
    out = x.new_empty(source.shape[0], width)
    if not source.shape[0]:
        return out
    other = weights if gated is None else gated
    with torch.cuda.device_of(x):
        EXPERTS.launch(
            (tiles.expert.shape[0], triton.cdiv(width, BLOCK_N)),
            out,
            x.detach(),
            weights.first.detach(),
            other.first.detach(),
            weights.offsets,
            other.offsets,
            source,
            target,
            tiles.expert,
            tiles.first,
            tiles.rows,
            x.stride(0),
            N=width,
            K=inner,
            GATED=gated is not None,
            ALIGN=min(weights.align, other.align),
            BLOCK_M=tiles.block,
            BLOCK_N=BLOCK_N,
            BLOCK_K=inputs_of_step(x.element_size()),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
            enable_fp_fusion=True,
        )
    return out


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    forms = [("bf16", FEW_PAIRS, True), ("bf16", MANY_PAIRS, True), ("fp16", MANY_PAIRS, False)]
    wide = [("fp32", block, gated) for block in (FEW_PAIRS, MANY_PAIRS) for gated in (True, False)]
    for element, block, gated in [*forms, *wide]:
        constexprs = {"N": 2048, "K": 7168, "GATED": int(gated), "ALIGN": 16, "BLOCK_M": block}
        constexprs |= {"BLOCK_N": BLOCK_N, "BLOCK_K": inputs_of_step(4 if element == "fp32" else 2)}
        values = ("out_ptr", "x_ptr", "weight_ptr", "other_ptr")
        signature = dict.fromkeys(values, f"*{element}")
        signature |= dict.fromkeys(constexprs, "constexpr")
        tables = [n for n in experts_kernel.arg_names if n.endswith("_ptr") and n not in values]
        signature |= dict.fromkeys(tables, "*i64") | {"stride_x": "i32"}
        options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "enable_fp_fusion": True}
        out.append((experts_kernel, signature, constexprs, options))
    return out
