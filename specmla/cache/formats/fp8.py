"""`fp8`: e4m3 codes with one scale for all rows (576 bytes for DeepSeek)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat, FormatPart, largest_scale, scale_problems
from specmla.cache.formats.e4m3 import E4M3_MAX, decode_e4m3, divide, encode_e4m3


@dataclass(frozen=True)
class Fp8Format(CacheFormat):
    """Stores round(x / k_scale) and reads code * k_scale, for latent and rotated key alike.

    With scale 1 nothing is divided or multiplied. NaN stays NaN in its place.

    Attributes:
        k_scale: a float32 value > 0 for which 448 * k_scale is finite in `dtype`.
        v_scale: None or `k_scale`, which is the same: keys and values are one latent.
    """

    name: ClassVar[str] = "fp8"
    k_scale: float = 1.0
    v_scale: float | None = field(default=None, compare=False)

    def problems(self) -> list[str]:
        """List every reason why there are no such rows, scales included."""
        largest = largest_scale(self.dtype, E4M3_MAX)
        return super().problems() + scale_problems(self.k_scale, self.v_scale, largest)

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """Latent, rope."""
        return (
            FormatPart("latent", torch.float8_e4m3fn, 0, self.kv_lora_rank),
            FormatPart("rope", torch.float8_e4m3fn, self.kv_lora_rank, self.qk_rope_head_dim),
        )

    def quantise(self, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Divide by the scale and round; see `CacheFormat.quantise`."""
        values = torch.cat([kv_latent, k_rope], dim=1).detach().to(torch.float32)
        return encode_e4m3(divide(values, self.k_scale))

    def dequantise(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply by the scale; see `CacheFormat.dequantise`."""
        dtype = dtype or self.dtype
        if self.k_scale == 1.0:
            return decode_e4m3(rows, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return decode_e4m3(rows, wide).mul_(self.k_scale).to(dtype)
