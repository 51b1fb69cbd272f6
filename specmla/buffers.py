"""A tensor to be: its shape, dtype and bytes, so that what is counted is what is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Buffer:
    """One contiguous tensor.

    Attributes:
        shape: of it.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, without the allocator's rounding."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Allocate it; what it holds is undefined."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def total_bytes(buffers: Iterable[Buffer]) -> int:
    """Sum the bytes of `buffers`."""
    return sum(buffer.num_bytes for buffer in buffers)
