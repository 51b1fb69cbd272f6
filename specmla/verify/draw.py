"""Draw tokens from rows of weights by inverting the cumulative sum."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import require


class Drawn(NamedTuple):
    """One token a row.

    Attributes:
        token: [R] int64; 0 in a flagged row.
        flagged: [R] bool, the row holds no positive weight, or one that is not finite.
    """

    token: Tensor
    flagged: Tensor


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token [R] int64 from each row of `probs` [R, W], as `draw` does.

    For rows known to be good: those of `processed_probs` always are.
    """
    return draw(probs, u).token


def draw(weights: Tensor, u: Tensor) -> Drawn:
    """Draw one token from each row of weights, which need not sum to 1.

    The weights become integers in float64: each is divided by the row's largest, scaled so that W
    of the largest fit 62 bits, and rounded. Integer sums are exact in any order, so the token does
    not depend on the device or on how many rows are drawn together, and a weight of 0 is never
    drawn. Rounding moves less than W**2 * 2**-63 of the mass (2**-29 at W = 2**17, less than a
    float32 softmax rounds; 2**-59 at W = 4).

    Args:
        weights: [R, W] float32 or float64, none negative.
        u: [R] float64 in [0, 1].

    Raises:
        ArgumentError: shapes that do not fit each other, or W = 0.
    """
    _check(weights, u)
    largest = weights.amax(-1).double()  # NaN wins a maximum
    flagged = ~((largest > 0) & (largest < math.inf))
    bits = 62 - (weights.shape[1] - 1).bit_length()
    scaled = torch.div(weights, largest[:, None])  # float64 by promotion
    scaled.mul_(2.0**bits).round_().masked_fill_(flagged[:, None], 0.0)
    mass = scaled.to(torch.int64).cumsum(-1)
    total = mass[:, -1]
    # Below the total even for u = 1; in a flagged row (total 0) -1, which finds id 0.
    target = torch.minimum((u * total.double()).to(torch.int64), total - 1)
    token = torch.searchsorted(mass, target[:, None], right=True)[:, 0]
    return Drawn(token, flagged)


def _check(weights: Tensor, u: Tensor) -> None:
    found = []
    if weights.dim() != 2 or weights.shape[1] == 0:
        found.append(f"weights has shape {tuple(weights.shape)}, accepted is [R, W] with W > 0")
    elif u.shape != weights.shape[:1]:
        found.append(f"u has shape {tuple(u.shape)}, accepted is {tuple(weights.shape[:1])}")
    require(found, "draw")
