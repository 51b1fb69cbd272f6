"""A drafter's own paged cache of keys and values.

A cached row is [keys | values] of one token. A pass gathers what its requests have cached and
attends densely over it: no kernel of ours is needed, and none is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from drafters.draft_cache import DraftCache
from specmla import BlockManager, LatentCache

if TYPE_CHECKING:
    import torch

    from drafters.gqa_config import GQAConfig


class KeyValueCache(DraftCache):
    """Pages of [keys | values] rows; no attention backend reads them."""

    def __init__(
        self,
        config: GQAConfig,
        num_layers: int,
        *,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = LatentCache(
            num_layers,
            num_pages,
            page_size,
            2 * config.num_kv_heads * config.head_dim,
            dtype=dtype,
            device=device,
            impl="torch",
        )
        self.blocks = BlockManager(num_pages, page_size, prefix_caching=False)
        self._unnamed = array("q", bytes(8 * max_seq_len))

    def table(self, request_ids: Sequence[Hashable], lengths: Sequence[int]) -> array[int]:
        """Give the slots of each request's rows, -1 up to the longest."""
        width, found = max(lengths), array("q")
        for name, length in zip(request_ids, lengths, strict=True):
            found.extend(self.slots(name, 0, length))
            found.extend([-1] * (width - length))
        return found
