"""The row format of a latent cache and its bytes.

A cached token is one row of A = C + R numbers, the normalised latent followed by the rotated key,
in the cache's dtype; a page is G rows one after the other (DeepSeek-V2, arXiv 2405.04434, section
2.1: what MLA caches). No scale, no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specmla.errors import require

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that a row may have; float64 is for tests against the reference."""


@dataclass(frozen=True)
class CacheLayout:
    """Bytes of rows, pages and pools.

    Attributes:
        width: A = C + R, numbers in a row.
        dtype: one of `DTYPES`.
        page_size: G, tokens in a page, any value >= 1.

    Raises:
        ArgumentError: names every field that can't be accepted.
    """

    width: int
    dtype: torch.dtype
    page_size: int

    def __post_init__(self) -> None:
        """Refuse what the cache can't hold."""
        require(layout_problems(self.width, self.dtype, self.page_size), "CacheLayout")

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token in one layer."""
        return self.width * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.bytes_per_row

    def bytes_per_pool(self, num_pages: int, num_layers: int = 1) -> int:
        """Bytes of `num_pages` pages in `num_layers` layers."""
        return num_layers * num_pages * self.bytes_per_page

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one request: ceil(num_tokens / G)."""
        return -(-num_tokens // self.page_size)


def layout_problems(width: int, dtype: torch.dtype, page_size: int) -> list[str]:
    """List every reason why a cache can't have this row format."""
    found = []
    if width < 1:
        found.append(f"width is {width}, accepted are values >= 1 (kv_lora_rank + rope)")
    if dtype not in DTYPES:
        found.append(f"dtype is {dtype}, accepted are {[str(d) for d in DTYPES]}")
    if page_size < 1:
        found.append(f"page_size is {page_size}, accepted are values >= 1")
    return found
