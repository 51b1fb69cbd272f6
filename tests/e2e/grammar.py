"""What random requests ask for: parameters, and a grammar that breaks when told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from specmla import SamplingParams
from tests.e2e.conftest import VOCAB


class BrokenError(Exception):
    """What a callback or a device would raise."""


class Grammar:
    """Lets about three of four tokens follow any token; breaks when its engine says so."""

    def __init__(self, tokens: Sequence[int], breaks: Callable[[str], None]) -> None:
        self.last, self.breaks = tokens[-1], breaks

    def row(self, last: int) -> torch.Tensor:
        return (last * 5 + torch.arange(VOCAB) * 3) % 4 != 0

    def masks(self, drafts: Sequence[int]) -> torch.Tensor:
        self.breaks("masks")
        rows = [self.row(self.last)]
        for token in drafts:
            if not rows[-1][token]:
                break
            rows.append(self.row(token))
        return torch.stack(rows)

    def advance(self, tokens: Sequence[int]) -> None:
        self.breaks("advance")
        self.last = tokens[-1]


ASKED = {
    "presence_penalty": 0.4,
    "repetition_penalty": 1.3,
    "banned_token_ids": (3, 9),
    "logit_bias": ((5, 2.0), (6, -1.0)),
    "min_tokens": 3,
    "stop_token_ids": (7, 30),
    "logprobs": "processed",
    "top_k": 10,
    "min_p": 0.02,
}


def random_params(
    rng: random.Random, temperature: float, seed: int, share: float = 0.3
) -> SamplingParams:
    """Ask for each of `ASKED` with the chance `share`."""
    kept = {name: value for name, value in ASKED.items() if rng.random() < share}
    return SamplingParams(temperature, seed=seed, max_tokens=rng.randint(1, 25), **kept)
