"""Whether cache, pages and metadata builder belong together, before a step is made of them."""

from __future__ import annotations

from specmla.builder import MetadataBuilder
from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache


def wiring_problems(
    cache: LatentCache,
    blocks: BlockManager,
    builder: MetadataBuilder,
    vocab_size: int,
    max_seq_len: int,
) -> list[str]:
    """List everything that keeps these from serving one step."""
    found = []
    sizes = {cache.page_size, blocks.page_size, builder.page_size}
    if len(sizes) > 1:
        found.append(f"page_size of cache, blocks and builder are {sorted(sizes)}, must agree")
    if blocks.num_pages > cache.num_pages:
        found.append(f"blocks has {blocks.num_pages} pages, the cache only {cache.num_pages}")
    if blocks.num_pages > builder.num_pages:
        found.append(f"blocks has {blocks.num_pages} pages, the builder takes {builder.num_pages}")
    if cache.device.type != builder.device.type:
        found.append(f"cache is on {cache.device}, builder on {builder.device}; must agree")
    read = builder.backend.cache_format
    if cache.format != read:
        found.append(
            f"cache holds {cache.format or 'plain rows'}, the builder's backend reads "
            f"{read or 'plain rows'}; must agree"
        )
    if vocab_size < 1:
        found.append(f"vocab_size is {vocab_size}, accepted are values >= 1")
    if not 2 <= max_seq_len <= builder.max_seq_len:
        found.append(
            f"max_seq_len is {max_seq_len}, accepted are 2 to {builder.max_seq_len} (the builder's)"
        )
    return found
