"""Pages of a pool as smaller blocks of a kernel: 128 tokens for the engine, 64 for the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.errors import require

LARGEST_ID = 2**31 - 1


def split_pages(pages: Tensor, block_size: int) -> Tensor:
    """View pages [N, G, columns] as blocks [N * G / block_size, block_size, columns].

    Block b of page p is p * G / block_size + b; nothing is copied.

    Args:
        pages: rows without gaps, between pages neither: block starts have one stride.
        block_size: a divisor of G.

    Raises:
        ArgumentError: another size, or gaps between pages.
    """
    num_pages, page_size, columns = pages.shape
    found = _size_problems(page_size, block_size)
    if num_pages > 1 and pages.stride(0) != page_size * pages.stride(1):
        found.append(
            f"pages have a stride of {pages.stride(0)}, accepted is {page_size * pages.stride(1)}: "
            "no gaps between them"
        )
    require(found, "split_pages")
    blocks = num_pages * (page_size // block_size)
    row, column = pages.stride()[1:]
    shape, strides = (blocks, block_size, columns), (block_size * row, row, column)
    return pages.as_strided(shape, strides, pages.storage_offset())


def split_table(block_table: Tensor, page_size: int, block_size: int) -> Tensor:
    """Name the blocks of each page: [B, M] int32 to [B, M * page_size / block_size] int32.

    Cells past a request's pages may hold anything; ids that would not fit become 2^31 - 1.

    Raises:
        ArgumentError: `block_size` is no divisor of `page_size`.
    """
    require(_size_problems(page_size, block_size), "split_table")
    ratio = page_size // block_size
    inside = torch.arange(ratio, device=block_table.device)
    blocks = block_table.long()[..., None] * ratio + inside
    return blocks.clamp(min=-1, max=LARGEST_ID).flatten(1).to(torch.int32)


def _size_problems(page_size: int, block_size: int) -> list[str]:
    if block_size >= 1 and page_size % block_size == 0:
        return []
    return [f"block_size is {block_size}, accepted are divisors of the page size {page_size}"]
