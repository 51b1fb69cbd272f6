"""Plain rows: A numbers in the cache's dtype, the latent followed by the rotated key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat, FormatPart

PLAIN_NAMES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Plain formats by name."""


@dataclass(frozen=True)
class PlainFormat(CacheFormat):
    """Copies; no scale, no padding, every bit survives (1,152 bytes in bf16 for DeepSeek)."""

    name: ClassVar[str] = "plain"

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """Latent, rope."""
        size, rank = self.dtype.itemsize, self.kv_lora_rank
        return (
            FormatPart("latent", self.dtype, 0, rank),
            FormatPart("rope", self.dtype, rank * size, self.qk_rope_head_dim),
        )

    @property
    def storage(self) -> tuple[torch.dtype, int]:
        """Rows are numbers, not bytes."""
        return self.dtype, self.width

    def quantise(self, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Join latent and rotated key; see `CacheFormat.quantise`."""
        return torch.cat([kv_latent, k_rope], dim=1).detach()

    def dequantise(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Give the rows themselves; see `CacheFormat.dequantise`."""
        return rows.to(dtype or self.dtype)


def quantised(format: CacheFormat | None) -> CacheFormat | None:
    """Give the format, or None if rows are plain numbers."""
    return None if isinstance(format, PlainFormat) else format
