"""Move: copy rows or pages inside the paged cache, all layers in one grid.

Sources and destinations of a move may overlap, so rows go through a staging buffer in two launches;
copied pages don't overlap and go straight in one. Layers are reached by their distance from the
first one, so they may be one allocation, interleaved views or allocations of their own.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel

BLOCK_ROWS, BLOCK_COLS = 32, 64
NUM_WARPS = 4
STAGING_BYTES = 64 << 20
"""Most bytes that a move stages at once; more rows take more rounds over fewer layers."""


class LayerTable(NamedTuple):
    """All layers as one base and distances.

    first: [N, G, A], layer 0. offsets: [L] int64 on the device, distance of each layer from it in
    elements. align: a power of two that divides all distances.
    """

    first: Tensor
    offsets: Tensor
    align: int

    @classmethod
    def of(cls, layers: Sequence[Tensor]) -> LayerTable:
        """Measure layers of equal shape, strides and dtype."""
        first, size = layers[0], layers[0].element_size()
        distances = [(layer.data_ptr() - first.data_ptr()) // size for layer in layers]
        align = 1
        while align < 16 and all(d % (2 * align) == 0 for d in distances):
            align *= 2
        with torch.inference_mode(False):
            offsets = torch.tensor(distances, dtype=torch.int64, device=first.device)
        return cls(first, offsets, align)


@triton.jit
def row_address(slot, stride_page, stride_row, G: tl.constexpr):
    """Distance of a slot's row from the start of its pool."""
    return slot // G * stride_page + slot % G * stride_row


@triton.jit(
    do_not_specialize=["first_layer", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=["src_slots_ptr", "dst_slots_ptr", "offsets_ptr"],
)
def move_kernel(
    pool_ptr,  # [N, G, A], layer 0
    staged_ptr,  # [layers of this round, n, A]
    offsets_ptr,  # [L] int64
    src_slots_ptr,  # [n] int64
    dst_slots_ptr,  # [n] int64
    first_layer,
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    FROM_POOL: tl.constexpr,
    TO_POOL: tl.constexpr,
    G: tl.constexpr,
    A: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of one layer: pool to staging, staging to pool, or pool to pool."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    layer = tl.program_id(2).to(tl.int64)
    src = tl.load(src_slots_ptr + rows, mask=rows < num_rows, other=-1)
    dst = tl.load(dst_slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (src >= 0) & (src < num_slots) & (dst >= 0) & (dst < num_slots)
    src, dst = tl.where(live, src, 0), tl.where(live, dst, 0)
    pool_ptr += tl.multiple_of(tl.load(offsets_ptr + first_layer + layer), ALIGN)
    staged = staged_ptr + (layer * num_rows + rows) * A
    source, target = staged, staged
    if FROM_POOL:
        source = pool_ptr + row_address(src, stride_page, stride_row, G)
    if TO_POOL:
        target = pool_ptr + row_address(dst, stride_page, stride_row, G)
    mask = live[:, None] & (cols < A)[None, :]
    found = tl.load(source[:, None] + cols[None, :], mask=mask)
    tl.store(target[:, None] + cols[None, :], found, mask=mask)


MOVE = DirectKernel(move_kernel)


def move_rows(table: LayerTable, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy rows `src_slots` [n] to `dst_slots` [n] in every layer, reading all before writing any.

    A pair with a slot outside the pool is skipped. Staging takes at most `STAGING_BYTES`, or one
    layer's rows where those are more.
    """
    num_rows, width = src_slots.shape[0], table.first.shape[2]
    bytes_a_layer = max(1, num_rows * width * table.first.element_size())
    num_layers = table.offsets.shape[0]
    per_round = max(1, min(num_layers, STAGING_BYTES // bytes_a_layer))
    staged = table.first.new_empty(per_round, num_rows, width)
    for start in range(0, num_layers, per_round):
        layers = range(start, min(start + per_round, num_layers))
        _launch(table, staged, (src_slots, dst_slots), layers, (True, False))
        _launch(table, staged, (src_slots, dst_slots), layers, (False, True))


def copy_pages(table: LayerTable, src_pages: Tensor, dst_pages: Tensor) -> None:
    """Copy pages `src_pages` [n] to `dst_pages` [n] int64 in every layer; no page is in both."""
    page_size = table.first.shape[1]
    inside = torch.arange(page_size, device=src_pages.device)
    src = (src_pages[:, None] * page_size + inside).flatten()
    dst = (dst_pages[:, None] * page_size + inside).flatten()
    # A direct copy has no use for a staging buffer; the kernel never touches the pointer.
    _launch(table, table.first, (src, dst), range(table.offsets.shape[0]), (True, True))


def _launch(
    table: LayerTable,
    staged: Tensor,
    slots: tuple[Tensor, Tensor],
    layers: range,
    ends: tuple[bool, bool],
) -> None:
    """Launch for `layers`; `ends` says whether source and destination are in the pool."""
    num_rows, (num_pages, page_size, width) = slots[0].shape[0], table.first.shape
    if num_rows == 0:
        return
    tiles = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLS))
    with torch.cuda.device_of(table.first):
        MOVE.launch(
            (*tiles, len(layers)),
            table.first,
            staged,
            table.offsets,
            slots[0].contiguous(),
            slots[1].contiguous(),
            layers.start,
            num_rows,
            num_pages * page_size,
            *table.first.stride()[:2],
            FROM_POOL=ends[0],
            TO_POOL=ends[1],
            G=page_size,
            A=width,
            ALIGN=table.align,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLS=BLOCK_COLS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, page, width in (("bf16", 64, 576), ("fp32", 1, 288)):
        for from_pool, to_pool in ((True, False), (False, True), (True, True)):
            constexprs = {"FROM_POOL": from_pool, "TO_POOL": to_pool, "G": page, "A": width}
            constexprs |= {"ALIGN": 16, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLS": BLOCK_COLS}
            signature = {"pool_ptr": f"*{element}", "staged_ptr": f"*{element}"}
            signature |= dict.fromkeys(("offsets_ptr", "src_slots_ptr", "dst_slots_ptr"), "*i64")
            signature |= dict.fromkeys(constexprs, "constexpr")
            scalars = [name for name in move_kernel.arg_names if name not in signature]
            signature |= dict.fromkeys(scalars, "i32")
            options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
            out.append((move_kernel, signature, constexprs, options))
    return out
