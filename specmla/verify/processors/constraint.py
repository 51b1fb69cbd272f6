"""The hook for grammars and whatever else allows some tokens only, given those before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specmla.errors import ArgumentError


class TokenConstraint(Protocol):
    """Says which tokens may follow; one object a request, with a state of committed tokens.

    `masks` must leave that state as it is: most drafts are not verified yet. Only `advance` moves
    it, once a step, by the tokens that were emitted.
    """

    def masks(self, drafts: Sequence[int]) -> Tensor:
        """Give the tokens allowed after 0, 1, 2 ... of the drafts.

        Args:
            drafts: candidates for the next tokens, in order.

        Returns:
            [n, W] bool on the CPU, 1 <= n <= len(drafts) + 1. Row j holds if the first j drafts
            follow. Fewer rows than drafts + 1: draft n is not allowed, so that what would follow it
            doesn't matter. A row that allows nothing ends the step's tokens with the draft before
            it; in row 0, with nothing to emit, it is an error.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that are emitted.

        If this raises, the step is cancelled (`ConstraintError`) and the object is not used again
        by right: nobody knows how much of the tokens it took. Those of the step's earlier requests
        have taken theirs.
        """
        ...


def constraint_rows(
    constraint: TokenConstraint, drafts: Sequence[int], vocab_size: int, num_rows: int
) -> Tensor:
    """Ask for the masks of one request as [num_rows, W]; rows that can't be reached allow all.

    Raises:
        ArgumentError: masks of another shape or dtype.
    """
    given = constraint.masks(drafts)
    good = (
        isinstance(given, Tensor)
        and given.dim() == 2
        and 1 <= given.shape[0] <= len(drafts) + 1
        and given.shape[1] == vocab_size
        and given.dtype is torch.bool
        and given.device.type == "cpu"
    )
    if not good:
        what = (
            f"{given.dtype} {tuple(given.shape)} on {given.device}"
            if isinstance(given, Tensor)
            else f"{given!r}"
        )
        raise ArgumentError(
            f"masks of {type(constraint).__name__} are {what}, accepted is torch.bool [n, W] = "
            f"[1 to {len(drafts) + 1}, {vocab_size}] on the CPU"
        )
    rows = torch.ones(num_rows, vocab_size, dtype=torch.bool)
    rows[: len(given)] = given
    return rows
