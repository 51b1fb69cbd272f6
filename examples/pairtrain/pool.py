"""Text sampled from the target, to distil on what a draft meets when it serves."""

from __future__ import annotations

import torch
from torch import Tensor

from pairtrain.sampler import LatentSampler
from pairtrain.windows import TokenWindows

SAMPLED_SHARE = 0.6  # of the pool, at temperature 1; the rest is greedy
CHUNK = 8192  # sequences decoded side by side


class SamplePool:
    """Windows that the target continued from the start of corpus windows.

    At temperature 1 all but the first eighth of a window is the target's own. Greedy text is
    shorter, two pieces a window, each half prompt: longer ones of a small model only loop.
    """

    def __init__(self, size: int, window: int) -> None:
        self._sampled = max(round(size * SAMPLED_SHARE), 1)
        self._greedy = max(size - self._sampled, 1)
        self._window = window
        self._tokens: Tensor | None = None

    def refill(
        self, sampler: LatentSampler, corpus: TokenWindows, generator: torch.Generator
    ) -> None:
        """Replace the pool by new samples."""
        window = self._window
        sampled = corpus.draw(self._sampled, generator)[:, : window // 8]
        greedy = corpus.draw(2 * self._greedy, generator)[:, : window // 4]
        self._tokens = torch.cat(
            (
                _extend(sampler, sampled, window, 1.0, generator),
                _extend(sampler, greedy, window // 2, 0.0, generator).view(self._greedy, -1),
            )
        )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return [count, window] int64, each window equally likely."""
        if self._tokens is None:
            raise RuntimeError("SamplePool.draw: the pool is empty; call refill first")
        tokens = self._tokens
        rows = torch.randint(0, len(tokens), (count,), generator=generator, device=tokens.device)
        return tokens[rows]


def _extend(
    sampler: LatentSampler,
    prompts: Tensor,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    parts = [
        sampler.extend(
            part, length, torch.full((len(part),), temperature, device=part.device), generator
        )
        for part in prompts.split(CHUNK)
    ]
    return torch.cat(parts)
