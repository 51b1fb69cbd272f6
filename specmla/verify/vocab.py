"""Bring draft distributions to the target's vocabulary size."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.errors import require


def check_vocab(draft_size: int, target_size: int, *, allow_mismatch: bool = False) -> None:
    """Refuse vocabularies of different sizes unless that is allowed explicitly.

    Raises:
        ArgumentError: the sizes differ and `allow_mismatch` is not set, or one is below 1.
    """
    found = []
    if draft_size < 1 or target_size < 1:
        found.append(f"draft_size={draft_size}, target_size={target_size}; accepted is 1 or more")
    elif draft_size != target_size and not allow_mismatch:
        found.append(
            f"the drafter has {draft_size} ids, the target {target_size}; if equal ids mean equal "
            "tokens and the rest is padding, allow it with allow_mismatch=True"
        )
    require(found, "vocabulary sizes")


def pad_vocab(q: Tensor, target_size: int, *, allow_mismatch: bool = False) -> Tensor:
    """Give q over the target's ids.

    A smaller draft vocabulary gets zeros (it proposes none of the missing ids). Of a larger one
    the ids that the target lacks are cut off: a row then sums to less than 1, and what is missing
    is the chance that a draft outside the target's vocabulary was drawn. Don't renormalise it:
    such a draft is always refused, and exactly the cut row keeps the output the target's.

    Args:
        q: [B, K, W of the drafter].
        target_size: W of the target.
        allow_mismatch: accept sizes that differ.

    Returns:
        [B, K, target_size]; q itself, or a view of it, where nothing is added.

    Raises:
        ArgumentError: as `check_vocab`, or q is not [B, K, W].
    """
    require(
        [f"q has shape {tuple(q.shape)}, accepted is [B, K, W]"] if q.dim() != 3 else [],
        "pad_vocab",
    )
    check_vocab(q.shape[2], target_size, allow_mismatch=allow_mismatch)
    missing = target_size - q.shape[2]
    if missing <= 0:
        return q[..., :target_size]
    return torch.nn.functional.pad(q, (0, missing))
