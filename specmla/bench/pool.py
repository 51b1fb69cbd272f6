"""One pool of cached rows that every point of a grid reads: made once, reused in windows."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ROWS = 1 << 18
GUARD_ROWS = 64


class PagePool:
    """Rows of standard normal data, NaN before the first and after the last.

    Args:
        num_rows: least number of rows that hold data.
        width: A. dtype, device: of the rows. seed: of the data.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.num_rows = -(-num_rows // GUARD_ROWS) * GUARD_ROWS
        generator = torch.Generator(device).manual_seed(seed)
        total = self.num_rows + 2 * GUARD_ROWS
        self._rows = torch.full((total, width), float("nan"), dtype=dtype, device=device)
        inner = self._rows[GUARD_ROWS : GUARD_ROWS + self.num_rows]
        for chunk in inner.split(CHUNK_ROWS):
            chunk.normal_(generator=generator)

    def windows(self, page_size: int, num_pages: int, most: int) -> list[Tensor]:
        """Cut disjoint caches [num_pages, G, A] out of the pool, at most `most` and at least one.

        The pages of a window are neighbours; which request owns which is permuted by the caller.
        """
        rows = page_size * num_pages
        assert rows <= self.num_rows
        count = max(1, min(most, self.num_rows // rows))
        starts = [GUARD_ROWS + i * rows for i in range(count)]
        width = self._rows.shape[1]
        return [self._rows[at : at + rows].view(num_pages, page_size, width) for at in starts]
