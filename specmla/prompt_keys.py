"""Up-projected keys and values of prompts, as the projection leaves them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PromptKeys(NamedTuple):
    """Keys and values, last strides 1; views of what they were made of.

    Attributes:
        key: [n, H, P], or [n, H, P + R] if `rope` is None.
        rope: [n, R], the rotated part that all heads share.
        value: [n, H, V].
    """

    key: Tensor
    rope: Tensor | None
    value: Tensor

    @property
    def width(self) -> int:
        """P + R."""
        return self.key.shape[2] + (0 if self.rope is None else self.rope.shape[1])

    def joined(self) -> Tensor:
        """Give keys [n, H, P + R], for kernels that read them so; a copy if there is a `rope`."""
        if self.rope is None:
            return self.key
        num_rows, heads, nope = self.key.shape
        made = torch.empty(
            num_rows, heads, self.width, dtype=self.key.dtype, device=self.key.device
        )
        # On a GPU torch.cat takes far longer for a strided and an expanded tensor.
        made[..., :nope].copy_(self.key)
        made[..., nope:].copy_(self.rope[:, None])
        return made
