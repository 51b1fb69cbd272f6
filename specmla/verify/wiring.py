"""The metadata builder of a model, and whether it, cache and pages belong together."""

from __future__ import annotations

from specmla.backends.base import AttentionBackend, Requirements
from specmla.backends.select import select_backend
from specmla.builder import MetadataBuilder
from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.query import QueryLenSupport


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
    if builder.rules.batch_invariant and blocks.prefix_caching and not blocks.prompts_only:
        found.append(
            "blocks has prefix_caching True and prompts_only False, the builder's rules are "
            "batch_invariant; accepted is prompts_only=True: rows of verifies round otherwise"
        )
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


def make_builder(
    model: DeepseekForCausalLM,
    num_pages: int,
    page_size: int,
    backend: str | AttentionBackend | None,
    max_seq_len: int,
) -> MetadataBuilder:
    """Select the backend that serves the model, before anything is allocated for it."""
    attention, weight = model.config.attention, model.model.embed_tokens.weight
    need = Requirements(
        device=weight.device,
        dtype=weight.dtype,
        num_heads=attention.num_heads,
        kv_lora_rank=attention.kv_lora_rank,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        page_size=page_size,
        query_len_support=QueryLenSupport.VARLEN,
        batch_invariant=model.batch_invariant,
    )
    return MetadataBuilder(
        backend=select_backend(need, backend),
        page_size=page_size,
        num_pages=num_pages,
        num_heads=attention.num_heads,
        kv_lora_rank=attention.kv_lora_rank,
        device=weight.device,
        max_seq_len=max_seq_len,
        dtype=weight.dtype,
    )
