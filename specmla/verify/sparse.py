"""A draft distribution given by the few ids it can draw."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from specmla.errors import ArgumentTypeError, require
from specmla.staging import send


class SparseProbs(NamedTuple):
    """Distributions over W ids, each zero but for C of them.

    What is given is exact: a drafter that draws from its C likeliest ids reports their
    probabilities renormalised over them, because that is what it drew from.

    Attributes:
        ids: [..., C] int64, distinct in a row. Entries outside 0 .. W - 1 count as absent: -1 where
            a row has fewer, ids of a larger draft vocabulary (see `pad_vocab`).
        probs: [..., C] float32 or float64; what stands beside an absent id may be anything.
    """

    ids: Tensor
    probs: Tensor

    def at(self, tokens: Tensor) -> Tensor:
        """Give the probability of tokens [...], in the dtype of `probs`; 0 where it is absent."""
        return torch.where(self.ids == tokens[..., None], self.probs, 0.0).sum(-1)

    def inside(self, width: int) -> tuple[Tensor, Tensor]:
        """Give ids and probabilities that can be scattered: absent ones as id 0 with 0."""
        there = (self.ids >= 0) & (self.ids < width)
        return self.ids.where(there, 0), self.probs.where(there, 0.0)

    def dense(self, width: int) -> Tensor:
        """Give the same distributions as [..., W]."""
        ids, probs = self.inside(width)
        return probs.new_zeros(*ids.shape[:-1], width).scatter_add_(-1, ids, probs)

    def to(self, device: torch.device) -> SparseProbs:
        """Bring both to the device without waiting for it."""
        return SparseProbs(send(self.ids, device), send(self.probs, device))

    def row_problems(self, drafted: Tensor) -> list[str]:
        """List which of the rows that are `drafted` [...] bool are no distributions."""
        there = self.ids >= 0
        probs = self.probs.where(there, 0.0)
        is_one = ((probs.sum(-1) - 1).abs() <= 1e-3) & (probs.amin(-1) >= 0)
        ordered = self.ids.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        bad = drafted & ~(is_one & ~twice.any(-1))
        if not bad.any():
            return []
        at = bad.nonzero().tolist()[:4]
        return [
            f"probs rows {at} are no distributions, accepted are distinct ids with probs >= 0 that "
            "sum to 1"
        ]


DraftProbs: TypeAlias = Tensor | SparseProbs | None
"""What drafts [...] were drawn from: [..., W] dense, sparse, or None where nothing was drawn (then
one-hot on the draft)."""


def check_sparse(probs: SparseProbs) -> None:
    """Check a sparse distribution.

    Raises:
        ArgumentError: ids and probs of different shapes, or C = 0.
        ArgumentTypeError: ids that are not int64, probs that are no float32 or float64, no tensors.
    """
    if not isinstance(probs.ids, Tensor) or not isinstance(probs.probs, Tensor):
        types = f"{type(probs.ids).__name__} and {type(probs.probs).__name__}"
        raise ArgumentTypeError(f"SparseProbs: ids and probs are {types}, accepted are tensors")
    if probs.ids.dtype != torch.int64:
        raise ArgumentTypeError(f"ids has dtype {probs.ids.dtype}, accepted is torch.int64")
    if probs.probs.dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(
            f"probs has dtype {probs.probs.dtype}, accepted are float32 and float64"
        )
    shape = tuple(probs.ids.shape)
    found = []
    if tuple(probs.probs.shape) != shape or not shape or not shape[-1]:
        found.append(
            f"ids has shape {shape}, probs {tuple(probs.probs.shape)}; accepted is one shape "
            "[..., C] with C > 0"
        )
    require(found, "SparseProbs")
