"""Drafters from directories: what a checkpoint is, its config.json says."""

from __future__ import annotations

from pathlib import Path

from drafters import (
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    MTPDrafter,
    load_block_model,
)
from specmla.cli.run import MakeDrafter
from specmla.errors import ArgumentError
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.mtp import load_mtp
from specmla.models.parts import read_part_config
from specmla.models.weights import load_checkpoint, read_config

PAGE = 64
BLOCKS = {"DFlashDraftModel": DFlashDrafter, "DSparkDraftModel": DSparkDrafter}


def drafter_from(
    folder: Path,
    target: DeepseekForCausalLM,
    *,
    num_requests: int,
    longest: int,
    backend: str | None = None,
) -> MakeDrafter:
    """Load a drafter: a DFlash or DSpark network, the target's MTP module, or a draft model.

    A DeepSeek checkpoint with an MTP layer behind as many layers as the target has is its module.

    Args:
        folder: of the checkpoint.
        target: that it drafts for.
        num_requests: at once.
        longest: tokens of a request, drafts included.
        backend: attention backend of the drafter's own cache, by name.

    Raises:
        CheckpointError: damaged, or nothing that can be served with this target.
        ArgumentError: a draft model of another vocabulary.
    """
    names = read_part_config(folder).get("architectures") or []
    block = next((BLOCKS[name] for name in names if name in BLOCKS), None)
    if block is not None:
        draft = load_block_model(folder, target)
        pages = num_requests * (-(-(longest + draft.config.block_size) // PAGE) + 1)
        return lambda step: block(target, draft, num_pages=pages, page_size=PAGE, backend=backend)
    config = read_config(folder)
    if config.num_mtp_layers and config.num_layers == target.config.num_layers:
        module = load_mtp(folder, target)
        return lambda step: MTPDrafter(target, module, step)
    weight = target.model.embed_tokens.weight
    model, _ = load_checkpoint(folder, device=weight.device, dtype=weight.dtype)
    if config.vocab_size != target.config.vocab_size:
        raise ArgumentError(
            f"draft {str(folder)!r} has a vocabulary of {config.vocab_size}, the target "
            f"{target.config.vocab_size}; accepted is the same size"
        )
    longest = min(longest, config.max_position_embeddings)
    pages = num_requests * (-(-longest // PAGE) + 1)
    return lambda step: DraftModelDrafter(model, num_pages=pages, backend=backend)
