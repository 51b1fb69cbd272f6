"""A drafter's own paged latent cache, with its own page size, dtype and attention backend."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from specmla import (
    BlockManager,
    DraftMask,
    LatentCache,
    MetadataBuilder,
    MLAConfig,
    QueryLenSupport,
    Requirements,
    select_backend,
)


class DraftCache:
    """Cache, pages and metadata builder of a drafter; requests are added as they come.

    Positions count from each request's first cached row, which need not be its first token: scores
    depend on differences of positions alone.

    Args:
        attention: dimensions of the drafter's layers.
        num_layers: L.
        num_pages, page_size: of its pool.
        max_seq_len: most rows of a request, scratch rows included.
        mask: relation among the new rows.
        dtype, device: of rows and step.
        backend: attention backend by name, the best one if None.
        query_len_support: what it must serve: equal numbers of rows are enough for blocks.

    Raises:
        UnsupportedError: no backend can serve it.
    """

    def __init__(
        self,
        attention: MLAConfig,
        num_layers: int,
        *,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        mask: DraftMask,
        dtype: torch.dtype,
        device: torch.device,
        backend: str | None = None,
        query_len_support: QueryLenSupport = QueryLenSupport.UNIFORM,
    ) -> None:
        need = Requirements(
            device=device,
            dtype=dtype,
            num_heads=attention.num_heads,
            kv_lora_rank=attention.kv_lora_rank,
            qk_rope_head_dim=attention.qk_rope_head_dim,
            page_size=page_size,
            masks=frozenset({mask}),
            query_len_support=query_len_support,
        )
        self.backend = select_backend(need, backend)
        self.rows = LatentCache(
            num_layers, num_pages, page_size, attention.cache_width, dtype=dtype, device=device
        )
        self.blocks = BlockManager(num_pages, page_size, prefix_caching=False)
        self.builder = MetadataBuilder(
            backend=self.backend,
            page_size=page_size,
            num_pages=num_pages,
            num_heads=attention.num_heads,
            kv_lora_rank=attention.kv_lora_rank,
            device=device,
            max_seq_len=max_seq_len,
            dtype=dtype,
        )
        self._unnamed = array("q", bytes(8 * max_seq_len))

    def reserve(self, needs: Mapping[Hashable, int]) -> None:
        """Make room for new rows of each request, or for none of them.

        Raises:
            PoolFullError: too few pages; nothing was reserved.
        """
        new = [name for name in needs if name not in self.blocks]
        for name in new:
            self.blocks.add(name, ())
        try:
            self.blocks.reserve(needs)
        except BaseException:
            for name in new:
                self.blocks.free(name)
            raise

    def length(self, request_id: Hashable) -> int:
        """Count the rows kept of a request; 0 if it is unknown."""
        return self.blocks.length(request_id) if request_id in self.blocks else 0

    def pages(self, request_id: Hashable) -> Sequence[int]:
        """Pages of a request in order."""
        return self.blocks.block_ids(request_id)

    def slots(self, request_id: Hashable, start: int, end: int) -> array[int]:
        """Give the slots of rows `start` .. `end` - 1."""
        return array("q", chain.from_iterable(self.slot_runs(self.pages(request_id), start, end)))

    def slot_runs(self, pages: Sequence[int], start: int, end: int) -> Iterator[range]:
        """Give the slots of rows `start` .. `end` - 1 in these pages, a run a page."""
        size = self.blocks.page_size
        while start < end:
            cell = start // size
            stop = min(end, (cell + 1) * size)
            shift = (pages[cell] - cell) * size
            yield range(start + shift, stop + shift)
            start = stop

    def keep(self, request_id: Hashable, length: int) -> None:
        """Keep the first `length` rows of a request and give all pages after them back."""
        self.blocks.commit(request_id, length, self._unnamed)

    def drop(self, request_id: Hashable) -> None:
        """Give all pages of a request back; unknown names are ignored."""
        if request_id in self.blocks:
            self.blocks.free(request_id)


@contextmanager
def given_back_by_errors(blocks: BlockManager, request_ids: Iterable[Hashable]) -> Iterator[None]:
    """Give back the pages that these requests reserve inside, if that fails; rows kept stay."""
    try:
        yield
    except BaseException:
        for name in request_ids:
            if name in blocks:
                blocks.roll_back(name, blocks.length(name))
        raise
