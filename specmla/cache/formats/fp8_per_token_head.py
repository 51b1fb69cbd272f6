"""`fp8_per_token_head`: e4m3 codes and two equal float32 scales a row (584 bytes for DeepSeek)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat, FormatPart
from specmla.cache.formats.e4m3 import decode_e4m3, dynamic_scale, encode_e4m3, finite_floats


@dataclass(frozen=True)
class Fp8PerTokenHeadFormat(CacheFormat):
    """Rows of A codes, the key's scale and the value's, which are the same number: 576 + 8 bytes.

    Rows lie at multiples of 8 bytes, not of 16. The scale is the row's largest absolute value, of
    latent and rotated key, / 448, cut to 20 significant bits; the key's is the one that is read.
    NaN stays NaN in its place and does not count for the scale; infinities become the largest
    finite number.
    """

    name: ClassVar[str] = "fp8_per_token_head"

    def problems(self) -> list[str]:
        """List every reason why there are no such rows."""
        found = super().problems()
        if self.width % 4:
            found.append(
                f"kv_lora_rank + qk_rope_head_dim is {self.width}, accepted are multiples of 4: "
                "float32 scales follow"
            )
        return found

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """Latent, rope, scales."""
        return (
            FormatPart("latent", torch.float8_e4m3fn, 0, self.kv_lora_rank),
            FormatPart("rope", torch.float8_e4m3fn, self.kv_lora_rank, self.qk_rope_head_dim),
            FormatPart("scales", torch.float32, self.width, 2),
        )

    def quantise(self, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Scale each row and round; see `CacheFormat.quantise`."""
        values = finite_floats(torch.cat([kv_latent, k_rope], dim=1))
        scale = dynamic_scale(values)
        pair = scale.repeat(1, 2).view(torch.uint8)
        return torch.cat([encode_e4m3(values / scale), pair], dim=1)

    def dequantise(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply each row by its first scale; see `CacheFormat.dequantise`."""
        dtype = dtype or self.dtype
        wide = torch.promote_types(dtype, torch.float32)
        scale = self.part("scales").of(rows)[:, :1].to(wide)
        return decode_e4m3(rows[:, : self.width].contiguous(), wide).mul_(scale).to(dtype)
