from __future__ import annotations

import pytest
import torch

from specmla.cache.kernel_blocks import split_pages, split_table
from specmla.errors import ArgumentError


@pytest.mark.parametrize("columns", [656, 1])
@pytest.mark.parametrize("block_size", [128, 64, 1])
def test_a_block_is_part_of_its_page(columns: int, block_size: int) -> None:
    pages = torch.arange(4 * 128 * columns).view(4, 128, columns)[1:]
    blocks = split_pages(pages, block_size)
    assert blocks.shape == (3 * 128 // block_size, block_size, columns)
    assert blocks.data_ptr() == pages.data_ptr()
    assert torch.equal(blocks.reshape(3, 128, columns), pages)
    table = torch.tensor([[2, 0], [1, 2**31 - 1]], dtype=torch.int32)
    ids = split_table(table, 128, block_size)
    assert ids.dtype is torch.int32
    ratio = 128 // block_size
    assert ids.shape == (2, 2 * ratio)
    assert torch.equal(blocks[ids[0].long()].flatten(0, 1), pages[[2, 0]].flatten(0, 1))
    assert torch.equal(blocks[ids[1, :ratio].long()].flatten(0, 1), pages[1])
    assert bool((ids[1, ratio:] == 2**31 - 1).all())


def test_gaps_and_other_sizes_are_refused() -> None:
    pages = torch.zeros(3, 129, 8)[:, :128]
    with pytest.raises(ArgumentError, match=r"block_size is 48.*stride of 1032"):
        split_pages(pages, 48)
    assert split_pages(pages[:1], 64).shape == (2, 64, 8)
    with pytest.raises(ArgumentError, match="block_size is 0"):
        split_table(torch.zeros(1, 1, dtype=torch.int32), 128, 0)
