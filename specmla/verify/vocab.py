"""Bring draft distributions to the target's vocabulary size."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.errors import require
from specmla.staging import send
from specmla.verify.sparse import SparseProbs


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


def send_probs(
    q: Tensor | SparseProbs, device: torch.device, target_size: int
) -> Tensor | SparseProbs:
    """Bring q to the device, dense rows over the target's ids; nothing waits."""
    if isinstance(q, SparseProbs):
        return q.to(device)  # ids that the target lacks count as absent there
    return pad_vocab(send(q, device), target_size, allow_mismatch=True)


def pick_probs(q: Tensor | SparseProbs, cells: Tensor) -> Tensor | SparseProbs:
    """Give the rows of q [B, K, ...] at `cells` [...], which count through B * K."""
    if isinstance(q, SparseProbs):
        return SparseProbs(*(t.flatten(0, 1)[cells] for t in q))
    rows = q.flatten(0, 1).index_select(0, cells.flatten())
    return rows.view(*cells.shape, q.shape[-1])


def dense_probs(q: Tensor | SparseProbs, target_size: int) -> Tensor:
    """Give q [B, K, ...] as dense rows over the target's ids."""
    if isinstance(q, SparseProbs):
        return q.dense(target_size)
    return pad_vocab(q, target_size, allow_mismatch=True)
