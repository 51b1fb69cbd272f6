"""Fills the pages that a reservation put in the place of shared ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache


def fill_copies(
    cache: LatentCache,
    blocks: BlockManager,
    copies: Sequence[tuple[int, int]],
    request_ids: Sequence[Hashable],
) -> None:
    """Copy pages (source, destination) in all layers, as `BlockManager.reserve` asked for.

    If that fails, the rows of the unfilled pages are given up before the error goes on: their
    requests compute them again, nobody reads them.
    """
    if not copies:
        return
    try:
        cache.copy_pages(copies)
    except BaseException:
        new, size = {target for _, target in copies}, blocks.page_size
        for request_id in request_ids:
            length = blocks.length(request_id)
            if new.intersection(blocks.block_ids(request_id)[length // size :]):
                blocks.roll_back(request_id, length - length % size)
        raise
