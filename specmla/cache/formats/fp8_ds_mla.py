"""`fp8_ds_mla`: e4m3 latents with a scale for every 128, the rotated key in bf16 (656 bytes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat, FormatPart
from specmla.cache.formats.e4m3 import decode_e4m3, dynamic_scale, encode_e4m3, finite_floats

GROUP = 128
"""Latents that share a scale."""


@dataclass(frozen=True)
class Fp8DsMlaFormat(CacheFormat):
    """Rows of C codes, C / 128 float32 scales and R bf16 numbers: 512 + 16 + 128 bytes.

    A scale is its group's largest absolute value / 448, cut to 20 significant bits. NaN stays NaN
    in its place and does not count for the scale; an infinite latent becomes the largest finite
    number. The rotated key is rounded to bf16 and keeps infinities.
    """

    name: ClassVar[str] = "fp8_ds_mla"

    def problems(self) -> list[str]:
        """List every reason why there are no such rows."""
        found = super().problems()
        if self.kv_lora_rank % GROUP:
            found.append(
                f"kv_lora_rank is {self.kv_lora_rank}, accepted are multiples of {GROUP}: a scale "
                "serves that many"
            )
        if self.qk_rope_head_dim % 2:
            found.append(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, accepted are even values: the "
                "scales need rows of whole 4 bytes"
            )
        return found

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """Latent, scales, rope."""
        rank, scales = self.kv_lora_rank, self.kv_lora_rank // GROUP
        return (
            FormatPart("latent", torch.float8_e4m3fn, 0, rank),
            FormatPart("scales", torch.float32, rank, scales),
            FormatPart("rope", torch.bfloat16, rank + 4 * scales, self.qk_rope_head_dim),
        )

    def quantise(self, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Scale each group of 128 and round; see `CacheFormat.quantise`."""
        groups = finite_floats(kv_latent).unflatten(1, (-1, GROUP))
        scale = dynamic_scale(groups)
        codes = encode_e4m3(groups / scale).flatten(1)
        rope = k_rope.detach().to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([codes, scale.flatten(1).view(torch.uint8), rope], dim=1)

    def dequantise(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply each group by its scale; see `CacheFormat.dequantise`."""
        dtype = dtype or self.dtype
        wide = torch.promote_types(dtype, torch.float32)
        latent, scales, rope = (part.of(rows) for part in self.parts)
        groups = decode_e4m3(latent, wide).unflatten(1, (-1, GROUP))
        values = groups.mul_(scales.to(wide)[..., None]).flatten(1)
        return torch.cat([values.to(dtype), rope.to(dtype)], dim=1)
