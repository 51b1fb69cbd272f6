"""Draw the children of a tree's nodes and say what each was drawn from, given its elder siblings.

Those rows are what `DraftProposal.probs` holds of a tree's nodes, and what `multi_round` needs.
Children that are not drawn (the likeliest c ids, a look-up) need no rows: they are one-hot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import ArgumentTypeError, require
from specmla.verify.draw import draw


class Siblings(NamedTuple):
    """Children of n nodes, in the order in which they were drawn.

    Attributes:
        tokens: [n, c] int64, -1 where q was exhausted.
        probs: [n, c, W], what each was drawn from; zeros where q was exhausted.
    """

    tokens: Tensor
    probs: Tensor


def draw_siblings(q: Tensor, u: Tensor, *, replacement: bool = False) -> Siblings:
    """Draw c children of each node.

    Args:
        q: [n, W] float32 or float64, rows that sum to 1.
        u: [n, c] float64 in (0, 1), of the stream `Stream.DRAFT`.
        replacement: draw all from q; else each from what its elder siblings left of q.

    Raises:
        ArgumentError: shapes that do not fit each other.
    """
    if q.dim() != 2 or u.dim() != 2 or u.shape[0] != q.shape[0]:
        require(
            [f"q has shape {tuple(q.shape)}, u {tuple(u.shape)}; accepted are [n, W] and [n, c]"],
            "draw_siblings",
        )
    left, tokens, rows = q, [], []
    for child in range(u.shape[1]):
        drawn = draw(left, u[:, child])
        rows.append(left)
        tokens.append(drawn.token.masked_fill(drawn.flagged, -1))
        if not replacement:
            left = _without(left, tokens[-1])
    if not tokens:
        return Siblings(u.new_empty(u.shape, dtype=torch.int64), q.new_empty(*u.shape, q.shape[1]))
    return Siblings(torch.stack(tokens, dim=1), torch.stack(rows, dim=1))


def without_replacement(q: Tensor, tokens: Tensor) -> Tensor:
    """Give what each of c siblings was drawn from: q without its elder siblings, renormalised.

    Args:
        q: [n, W] float32 or float64.
        tokens: [n, c] int64 in the order of drawing; negative ones take nothing away.

    Returns:
        [n, c, W]; zeros where the elder siblings have exhausted q.

    Raises:
        ArgumentError: shapes that do not fit each other.
        ArgumentTypeError: tokens that are not int64.
    """
    if tokens.dtype != torch.int64:
        raise ArgumentTypeError(f"tokens has dtype {tokens.dtype}, accepted is torch.int64")
    if q.dim() != 2 or tokens.dim() != 2 or tokens.shape[0] != q.shape[0]:
        require(
            [
                f"q has shape {tuple(q.shape)}, tokens {tuple(tokens.shape)}; accepted are [n, W] "
                "and [n, c]"
            ],
            "without_replacement",
        )
    rows, left = q.new_zeros(*tokens.shape, q.shape[1]), q
    for child in range(tokens.shape[1]):
        rows[:, child] = left
        left = _without(left, tokens[:, child])
    return rows


def _without(q: Tensor, token: Tensor) -> Tensor:
    """Take one id [n] out of each row [n, W] and renormalise; zeros where nothing is left."""
    at = token.clamp(0, q.shape[1] - 1)[:, None]
    kept = torch.where((token >= 0) & (token < q.shape[1]), 0.0, q.gather(1, at)[:, 0])
    left = q.scatter(1, at, kept[:, None].to(q.dtype))
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, 0.0)
