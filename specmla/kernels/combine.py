"""Merge of the pieces of cut tiles: partial outputs and their LSE into rows, in float32."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.launch import FP_FUSION, describe_device
from specmla.kernels.pieces import FIELDS
from specmla.kernels.plan import PiecePlan
from specmla.kernels.prims import MAX_FLOOR

FEW_PIECES = 8
"""Up to so many pieces a program merges a whole row; beyond, rows are cut into column chunks."""

COLUMN_CHUNK = 128
"""Columns of a program that merges many pieces."""

PIECE_CHUNK = 32
"""Most pieces that a program loads at a time."""

PROGRAMS_PER_SM = 16
"""Programs of four warps that fit one SM; each takes rows in turn."""


@triton.jit
def merge_row(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    record,
    lane,
    column,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge COLUMNS columns of row `lane` of a cut tile, CHUNK pieces at a time, in key order.

    A row without keys becomes output 0 and LSE -inf. Pieces without keys change no bit.
    """
    first, step, pieces = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row = (tl.load(record + 3) + lane).to(tl.int64)
    columns = column + tl.arange(0, COLUMNS)
    top = tl.max(tl.full([CHUNK], MAX_FLOOR, tl.float32), axis=0)
    total = top * 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, pieces, CHUNK):
        piece = start + tl.arange(0, CHUNK)
        held = piece < pieces
        at = (first + piece * step).to(tl.int64) * BLOCK_M + lane
        lse = tl.load(partial_lse_ptr + at, mask=held, other=float("-inf"))
        source = partial_ptr + (at * C)[:, None] + columns[None, :]
        part = tl.load(source, mask=held[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weight = tl.exp(lse - new_top)
        shrink = tl.exp(top - new_top)
        # An empty piece may carry any bits: its weight is 0, and so must be its product.
        part = tl.where((weight > 0.0)[:, None], part, 0.0) * weight[:, None]
        acc = acc * shrink + tl.sum(part, axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        top = new_top
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    out = tl.div_rn(acc, tl.zeros_like(acc) + safe)
    tl.store(out_ptr + row * C + columns, out.to(out_ptr.dtype.element_ty))
    if column == 0:
        tl.store(lse_ptr + row, tl.where(empty, float("-inf"), top + tl.log(safe)))


@triton.jit
def combine_kernel(
    partial_ptr,  # [slots, BLOCK_M, C] float32
    partial_lse_ptr,  # [slots, BLOCK_M] float32
    merge_ptr,  # [1 + cut tiles, FIELDS] int32
    out_ptr,  # [T, H, C], contiguous
    lse_ptr,  # [T, H] float32, contiguous
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,  # pieces that a program merges at once in a whole row, or 0
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge every listed tile; programs take its rows, or parts of them, in turn."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows = tl.load(merge_ptr) * BLOCK_M
    if FEW > 0:
        is_few = tl.load(merge_ptr + 1) <= FEW
        for item in range(program, tl.where(is_few, rows, 0), programs):
            record = merge_ptr + (1 + item // BLOCK_M) * FIELDS
            lane = item % BLOCK_M
            if lane < tl.load(record + 4):
                merge_row(
                    partial_ptr,
                    partial_lse_ptr,
                    out_ptr,
                    lse_ptr,
                    record,
                    lane,
                    0,
                    C=C,
                    BLOCK_M=BLOCK_M,
                    COLUMNS=C,
                    CHUNK=FEW,
                )
        rows = tl.where(is_few, 0, rows)
    for item in range(program, rows * (C // COLUMNS), programs):
        row, part = item // (C // COLUMNS), item % (C // COLUMNS)
        record = merge_ptr + (1 + row // BLOCK_M) * FIELDS
        lane = row % BLOCK_M
        if lane < tl.load(record + 4):
            merge_row(
                partial_ptr,
                partial_lse_ptr,
                out_ptr,
                lse_ptr,
                record,
                lane,
                part * COLUMNS,
                C=C,
                BLOCK_M=BLOCK_M,
                COLUMNS=COLUMNS,
                CHUNK=CHUNK,
            )


COMBINE = DirectKernel(combine_kernel)


def combine(out: Tensor, lse: Tensor, plan: PiecePlan) -> None:
    """Merge the plan's partial results into `out` [T, H, C] and `lse` [T, H], where there are any.

    Args:
        out: any float dtype, contiguous.
        lse: float32, contiguous.
        plan: holds the partials and the list of cut tiles.
    """
    if not plan.bounds.slots:
        return
    rank, block_m = plan.shape.rank, plan.entry.block_m
    columns = min(rank, COLUMN_CHUNK)
    most = (plan.merges.shape[0] - 1) * block_m * (rank // columns)
    programs = min(most, describe_device(out.device).num_sms * PROGRAMS_PER_SM)
    COMBINE.launch(
        (programs,),
        plan.partial_out,
        plan.partial_lse,
        plan.merges,
        out,
        lse,
        C=rank,
        BLOCK_M=block_m,
        # One form for any batch, if rows must get the same bits in all of them.
        FEW=FEW_PIECES if plan.rule.piece_keys is None else 0,
        CHUNK=PIECE_CHUNK,
        COLUMNS=columns,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )
