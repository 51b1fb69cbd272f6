"""What a layer refuses of a step before it stores a row: parts that don't go together."""

from __future__ import annotations

from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig
from specmla.errors import kind_problem
from specmla.metadata import StepMetadata
from specmla.quant_output import QuantOutput


def input_problems(
    config: MLAConfig,
    hidden: Tensor,
    cache: LatentCache,
    layer_id: int,
    metadata: StepMetadata,
    backend: AttentionBackend,
    output: QuantOutput | None,
) -> list[str]:
    """List why `MLAAttention.attend` can't run with these; nothing waits for the device."""
    found, rows = [], metadata.num_rows
    if output is not None:
        width, head = config.num_heads * config.v_head_dim, config.v_head_dim
        found = kind_problem("output", output, QuantOutput)
        found = found or output.problems(rows, width, hidden.dtype, head, hidden.device)
    if hidden.shape != (rows, config.hidden_size):
        found.append(
            f"hidden has shape {tuple(hidden.shape)}, accepted is [T={rows}, "
            f"D={config.hidden_size}]"
        )
    if not 0 <= layer_id < cache.num_layers:
        found.append(f"layer_id is {layer_id}, accepted are 0 to {cache.num_layers - 1}")
    if cache.width != config.cache_width:
        found.append(
            f"cache has a width of {cache.width}, accepted is C + R = {config.cache_width}"
        )
    held, read = cache.format, backend.cache_format
    if held is not read and held != read:
        # Codes of one scale read by another are wrong numbers that nothing later would notice.
        found.append(
            f"cache holds {held or 'plain rows'}, the backend reads {read or 'plain rows'}; must "
            "agree"
        )
    return found + _step_problems(cache, metadata)


def _step_problems(cache: LatentCache, metadata: StepMetadata) -> list[str]:
    """List why a step was not built for this cache."""
    found, verify, prefill = [], metadata.verify, metadata.prefill
    if verify is not None and verify.page_size != cache.page_size:
        found.append(
            f"cache has pages of {cache.page_size} tokens, accepted are {verify.page_size}, as the "
            "step was built for"
        )
    if verify is not None and verify.num_pages > cache.num_pages:
        found.append(
            f"cache has {cache.num_pages} pages, accepted are at least {verify.num_pages}, as the "
            "step was built for"
        )
    workspace = None if prefill is None else prefill.workspace
    if workspace is not None and workspace.width != cache.width:
        found.append(f"workspace has a width of {workspace.width}, accepted is {cache.width}")
    return found
