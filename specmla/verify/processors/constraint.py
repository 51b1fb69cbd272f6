"""The hook for grammars and whatever else allows some tokens only, given those before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.errors import ArgumentError


class TokenConstraint(Protocol):
    """Says which tokens may follow; one object a request, with a state of committed tokens.

    `masks` must leave that state as it is: most drafts are not verified yet. Only `advance` moves
    it, once a step, by the tokens that were emitted. Of a tree `masks` is asked for every path from
    the anchor's child to a leaf, one after the other.
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


class Drafted(NamedTuple):
    """The drafts of one request, in the order of its rows.

    Attributes:
        tokens: [n], one that is no id of the target is never accepted, nor what hangs on it.
        parents: [n] row of each one's parent, 0 the anchor's; of a chain 0, 1, 2 ...
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Drafted:
        """Give drafts that follow each other."""
        return cls(tokens, range(len(tokens)))

    def paths(self, vocab_size: int) -> list[list[int]]:
        """List the rows of each path to a leaf, from the anchor's child on.

        A path ends before a token that is no id; there is one at least, which may be empty.
        """
        inner = set(self.parents)
        leaves = [row for row in range(1, len(self.tokens) + 1) if row not in inner]
        found: list[list[int]] = []
        for leaf in leaves:
            rows, at = [leaf], self.parents[leaf - 1]
            while at:
                rows.append(at)
                at = self.parents[at - 1]
            rows.reverse()
            good = [0 <= self.tokens[row - 1] < vocab_size for row in rows]
            path = rows[: good.index(False)] if False in good else rows
            if path not in found:
                found.append(path)
        return found or [[]]


def constraint_rows(
    constraint: TokenConstraint, drafted: Drafted, vocab_size: int, num_rows: int
) -> Tensor:
    """Ask for the masks of one request as [num_rows, W]; rows that can't be reached allow all.

    Raises:
        ArgumentError: masks of another shape or dtype.
    """
    rows = torch.ones(num_rows, vocab_size, dtype=torch.bool)
    for path in drafted.paths(vocab_size):
        given = _ask(constraint, [drafted.tokens[row - 1] for row in path], vocab_size)
        rows[[0, *path][: len(given)]] = given
    return rows


def _ask(constraint: TokenConstraint, drafts: list[int], vocab_size: int) -> Tensor:
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
    return given
