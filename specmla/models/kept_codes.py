"""Up-projections of a model that stay e4m3 codes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from specmla.e4m3_up_projection import E4M3UpProjection
from specmla.errors import CheckpointError
from specmla.layer import MLAAttention
from specmla.models.match import Match
from specmla.models.shards import list_some

Kept = Mapping[str, E4M3UpProjection]
"""Modules by the name of their weight in a checkpoint."""


def kept_codes(model: nn.Module) -> Kept:
    """Find the up-projections of a model that are codes."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, E4M3UpProjection)
    }


def keep_codes(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Put an `E4M3UpProjection` of `dtype`, with memory on `device`, into every layer."""
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            with torch.device(device):
                layer.kv_b_proj = E4M3UpProjection(layer.config, dtype)


def require_codes(folder: Path, kept: Kept, match: Match) -> None:
    """Refuse a checkpoint in which kept codes are none.

    Raises:
        CheckpointError: naming them.
    """
    missing = [name for name in kept if name not in match.scales]
    if missing:
        raise CheckpointError(
            f"{folder}: {list_some(missing)}: not e4m3 with a scale, which codes that are kept "
            "have to be"
        )
