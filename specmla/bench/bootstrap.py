"""Bootstrap intervals of ratios over prompts (Efron 1979): prompts are drawn anew, with their sums.

What one prompt's steps gave hangs together, so prompts and not steps are the units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.errors import ArgumentError

DRAWS = 4000
LEVEL = 0.95


def resamples(num_prompts: int, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """Draw [draws, num_prompts] int64, prompts with replacement; equal seeds give equal ones."""
    if num_prompts < 1:
        raise ArgumentError(f"num_prompts is {num_prompts}, accepted are values >= 1")
    made = torch.Generator().manual_seed(seed)
    return torch.randint(num_prompts, (draws, num_prompts), generator=made)


def ratios(parts: Sequence[float], wholes: Sequence[float], drawn: Tensor) -> Tensor:
    """Give the ratio of sums [draws] of each resample; resamples whose whole is 0 are left out."""
    part = torch.tensor(parts, dtype=torch.float64)[drawn].sum(1)
    whole = torch.tensor(wholes, dtype=torch.float64)[drawn].sum(1)
    return part[whole > 0] / whole[whole > 0]


def interval(values: Tensor, level: float = LEVEL) -> list[float]:
    """Give the percentile interval [low, high] of resampled values; [0, 0] of none."""
    if not len(values):
        return [0.0, 0.0]
    edge = (1 - level) / 2
    ends: list[float] = values.quantile(torch.tensor([edge, 1 - edge], dtype=values.dtype)).tolist()
    return ends
