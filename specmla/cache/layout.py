"""Bytes of a latent cache: of rows, pages and pools.

A cached token is one row of A = C + R numbers, the normalised latent followed by the rotated key
(DeepSeek-V2, arXiv 2405.04434, section 2.1: what MLA caches); a page is G rows one after the other,
without gaps. A row is plain, or as a `CacheFormat` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specmla.buffers import Buffer
from specmla.cache.formats.base import DTYPES as DTYPES
from specmla.cache.formats.base import CacheFormat
from specmla.errors import count_problems, require


@dataclass(frozen=True)
class CacheLayout:
    """Bytes of rows, pages and pools.

    Attributes:
        width: A = C + R, numbers in a row.
        dtype: of the rows that are stored and gathered.
        page_size: G, tokens in a page, any value >= 1.
        format: None for plain rows; else the same width and dtype.

    Raises:
        ArgumentError: names every field that can't be accepted.
    """

    width: int
    dtype: torch.dtype
    page_size: int
    format: CacheFormat | None = None

    def __post_init__(self) -> None:
        """Refuse what the cache can't hold."""
        found = layout_problems(self.width, self.dtype, self.page_size)
        require(found + format_problems(self.format, self.width, self.dtype), "CacheLayout")

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token in one layer."""
        if self.format is not None:
            return self.format.bytes_per_row
        return self.width * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.bytes_per_row

    def bytes_per_pool(self, num_pages: int, num_layers: int = 1) -> int:
        """Bytes of `num_pages` pages in `num_layers` layers."""
        return self.pool(num_pages, num_layers).num_bytes

    def pool(self, num_pages: int, num_layers: int = 1) -> Buffer:
        """Give the tensor [L, N, G, columns] that holds so many pages: what a cache allocates."""
        dtype, columns = self.format.storage if self.format else (self.dtype, self.width)
        return Buffer((num_layers, num_pages, self.page_size, columns), dtype)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one request: ceil(num_tokens / G)."""
        return -(-num_tokens // self.page_size)


def layout_problems(width: int, dtype: torch.dtype, page_size: int) -> list[str]:
    """List every reason why a cache can't have this row format."""
    found = count_problems({"width": width, "page_size": page_size})  # width is C + R
    if dtype not in DTYPES:
        found.append(f"dtype is {dtype}, accepted are {[str(d) for d in DTYPES]}")
    return found


def format_problems(format: CacheFormat | None, width: int, dtype: torch.dtype) -> list[str]:
    """List what a row format and its cache disagree on."""
    if format is None:
        return []
    if not isinstance(format, CacheFormat):
        return [f"format is {format!r}, accepted are None and what cache_format(name, C, R) gives"]
    found = []
    if format.width != width:
        found.append(f"width is {width}, accepted is {format.width}, that of {format}")
    if format.dtype != dtype:
        found.append(f"dtype is {dtype}, accepted is {format.dtype}, that of {format}")
    return found
