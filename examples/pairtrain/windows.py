"""Token windows of a corpus that lies on the device as one int16 tensor."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenWindows:
    """Draws windows of consecutive tokens.

    Args:
        tokens: [n] int16, on the device of the training.
        length: tokens of a window.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        if tokens.numel() < length:
            raise ValueError(
                f"tokens: the corpus holds {tokens.numel()} tokens, a window needs {length}; "
                "give more source files or shorter windows"
            )
        self.tokens = tokens
        self.length = length
        self._offsets = torch.arange(length, device=tokens.device)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return [count, length] int64 at random places."""
        starts = torch.randint(
            0,
            self.tokens.numel() - self.length + 1,
            (count,),
            generator=generator,
            device=self.tokens.device,
        )
        return self._take(starts)

    def spread(self, count: int) -> Tensor:
        """Return [count, length] int64 at evenly spread places, the same ones every time."""
        last = self.tokens.numel() - self.length
        starts = torch.linspace(0, last, count, dtype=torch.float64).long()
        return self._take(starts.to(self.tokens.device))

    def _take(self, starts: Tensor) -> Tensor:
        return self.tokens[starts[:, None] + self._offsets].long()
