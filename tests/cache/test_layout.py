from __future__ import annotations

import pytest
import torch

from specmla.cache import CacheLayout
from specmla.errors import ArgumentError


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [(torch.bfloat16, 1152), (torch.float16, 1152), (torch.float32, 2304), (torch.float64, 4608)],
)
def test_bytes_of_deepseek_rows(dtype: torch.dtype, row_bytes: int) -> None:
    layout = CacheLayout(width=576, dtype=dtype, page_size=64)
    assert layout.bytes_per_row == row_bytes
    assert layout.bytes_per_page == 64 * row_bytes
    assert layout.bytes_per_pool(116_700) == 116_700 * 64 * row_bytes
    assert layout.bytes_per_pool(10, num_layers=61) == 61 * 10 * 64 * row_bytes


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_pages_for_is_the_least_number_of_pages_that_holds_the_tokens(page_size: int) -> None:
    layout = CacheLayout(width=8, dtype=torch.float32, page_size=page_size)
    assert layout.pages_for(0) == 0
    for tokens in range(1, 3 * page_size + 2):
        pages = layout.pages_for(tokens)
        assert (pages - 1) * page_size < tokens <= pages * page_size


def test_every_refused_field_is_named_at_once() -> None:
    with pytest.raises(ArgumentError) as error:
        CacheLayout(width=0, dtype=torch.int8, page_size=-1)
    for part in ("width is 0", "dtype is torch.int8", "torch.bfloat16", "page_size is -1"):
        assert part in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64, torch.bool])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=str(dtype)):
        CacheLayout(width=576, dtype=dtype, page_size=64)
