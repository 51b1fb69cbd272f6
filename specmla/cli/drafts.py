"""Drafters from directories: what a checkpoint is, its config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters import (
    DDTreeDrafter,
    DFlashDrafter,
    DraftModelDrafter,
    DraftModelTreeDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    GQABlockModel,
    GQADFlashDrafter,
    GQADSparkDrafter,
    GQAEagle3Drafter,
    GQAEagle3Model,
    MTPDrafter,
    load_block_model,
    load_eagle3,
)
from drafters.block import BlockDrafter
from drafters.block_fields import NAMES as BLOCKS
from drafters.block_fields import architectures_of
from drafters.eagle3_fields import ARCHITECTURES as EAGLE3
from drafters.eagle3_fields import is_eagle3
from drafters.speculators_config import KINDS as SPECULATORS
from drafters.speculators_config import is_speculators
from specmla.cli.run import MakeDrafter
from specmla.errors import ArgumentError, CheckpointError
from specmla.models.config import MODEL_TYPES, DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.mtp import load_mtp
from specmla.models.parts import read_part_config
from specmla.models.shards import read_headers
from specmla.models.weights import load_checkpoint, read_config
from specmla.verify.proposal import Drafter
from specmla.verify.step import VerifyStep

PAGE = 64


def drafter_from(
    folder: Path,
    target: DeepseekForCausalLM,
    *,
    num_requests: int,
    longest: int,
    backend: str | None = None,
    tree: bool = False,
) -> MakeDrafter:
    """Load a drafter: a DFlash or DSpark network, an EAGLE-3 head, an MTP module or a draft model.

    A DeepSeek checkpoint with an MTP layer behind as many layers as the target has is its module.

    Args:
        folder: of the checkpoint.
        target: that it drafts for.
        num_requests: at once.
        longest: tokens of a request, drafts included.
        backend: attention backend of the drafter's own cache, by name.
        tree: draft trees: a draft model's, or those of a DFlash block's marginals.

    Raises:
        CheckpointError: damaged, or nothing that can be served with this target.
        ArgumentError: a draft model of another vocabulary, trees of what drafts chains only.
    """
    longest = min(longest, target.config.max_position_embeddings)
    found = read_part_config(folder)
    _refuse_foreign(found, folder)
    if is_eagle3(found):
        if tree:
            raise ArgumentError(f"tree is set and {str(folder)!r} is an EAGLE-3 head: chains only")
        return _head_maker(folder, target, num_requests, longest, backend)
    if is_speculators(found) or any(name in BLOCKS for name in architectures_of(found)):
        return _block_maker(folder, target, num_requests, longest, backend, tree)
    config = read_config(folder)
    if config.num_mtp_layers and config.num_layers == target.config.num_layers:
        if tree:
            raise ArgumentError(f"tree is set and {str(folder)!r} is an MTP module: chains only")
        module = load_mtp(folder, target)
        return lambda step: MTPDrafter(target, module, step)
    _refuse_other_module(config, folder, target)
    return _model_maker(folder, target, num_requests, longest, backend, tree)


def _model_maker(
    folder: Path,
    target: DeepseekForCausalLM,
    num_requests: int,
    longest: int,
    backend: str | None,
    tree: bool,
) -> MakeDrafter:
    """Load a draft model, of the target's vocabulary."""
    weight = target.model.embed_tokens.weight
    model, config = load_checkpoint(folder, device=weight.device, dtype=weight.dtype)
    if config.vocab_size != target.config.vocab_size:
        raise ArgumentError(
            f"draft {str(folder)!r} has a vocabulary of {config.vocab_size}, the target "
            f"{target.config.vocab_size}; accepted is the same size"
        )
    longest = min(longest, config.max_position_embeddings)
    pages = num_requests * (-(-longest // PAGE) + 1)
    kind = DraftModelTreeDrafter if tree else DraftModelDrafter
    return lambda step: kind(model, num_pages=pages, backend=backend)


def _head_maker(
    folder: Path,
    target: DeepseekForCausalLM,
    num_requests: int,
    longest: int,
    backend: str | None,
) -> MakeDrafter:
    """Load an EAGLE-3 head; of an MLA or a grouped-query layer, as the checkpoint says."""
    head, kind = load_eagle3(folder, target), Eagle3Drafter
    if isinstance(head, GQAEagle3Model):  # which no attention backend serves
        kind, backend = GQAEagle3Drafter, None
    pages = num_requests * (-(-longest // PAGE) + 1)
    return lambda step: kind(target, head, num_pages=pages, page_size=PAGE, backend=backend)


def _block_maker(
    folder: Path,
    target: DeepseekForCausalLM,
    num_requests: int,
    longest: int,
    backend: str | None,
    tree: bool,
) -> MakeDrafter:
    """Load a block drafter's network; MLA or grouped-query layers, as the checkpoint says."""
    draft = load_block_model(folder, target)
    if tree and draft.has_markov:
        raise ArgumentError(f"tree is set and {str(folder)!r} is a DSpark network: chains only")
    kind: type[BlockDrafter] = DSparkDrafter if draft.has_markov else DFlashDrafter
    if isinstance(draft, GQABlockModel):  # which no attention backend serves
        kind, backend = GQADSparkDrafter if draft.has_markov else GQADFlashDrafter, None
    pages = num_requests * (-(-(longest + draft.config.block_size) // PAGE) + 1)

    def make(step: VerifyStep) -> Drafter:
        made = kind(target, draft, num_pages=pages, page_size=PAGE, backend=backend)
        return DDTreeDrafter(made) if tree else made

    return make


def _refuse_foreign(found: Mapping[str, Any], folder: Path) -> None:
    """Name what is known and not served, rather than what it lacks of ours.

    Raises:
        CheckpointError: another kind of drafter, grouped queries of what is none.
    """
    names, kind = architectures_of(found), found.get("speculators_model_type")
    known = [*BLOCKS, *EAGLE3, *MODEL_TYPES]
    reason = None
    if is_speculators(found):
        if kind not in (kinds := [*SPECULATORS, "eagle3"]):
            reason = f"speculators_model_type is {kind!r}, accepted are {kinds}"
    elif names and not any(name in known for name in names):
        reason = f"architectures is {names}, accepted are {known}"
    if reason is not None:
        raise CheckpointError(f"{folder}: {reason}")


def _refuse_other_module(config: DeepseekConfig, folder: Path, target: DeepseekForCausalLM) -> None:
    """Tell an MTP module by itself, behind as many layers as another target has, from a model.

    Raises:
        CheckpointError: it is one.
    """
    prefix = f"model.layers.{config.num_layers}."
    names = [name for header in read_headers(folder).values() for name in header]
    if config.num_mtp_layers and names and all(name.startswith(prefix) for name in names):
        raise CheckpointError(
            f"{folder}: an MTP module of a target of num_hidden_layers {config.num_layers}, the "
            f"target's are {target.config.num_layers}"
        )
