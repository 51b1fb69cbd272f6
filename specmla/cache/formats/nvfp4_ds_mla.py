"""`nvfp4_ds_mla`: e2m1 latents with an e4m3 scale for every 16, e4m3 rotated key (352 bytes).

The order of bytes is ours, linear, and not claimed to be anyone else's: no scale is swizzled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat, FormatPart, largest_scale, scale_problems
from specmla.cache.formats.e4m3 import (
    E4M3_MAX,
    NAN_CODE,
    decode_e4m3,
    divide,
    encode_e4m3,
    finite_floats,
)

GROUP = 16
"""Latents that share a scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 .. 7; bit 3 is the sign (OCP FP4)."""

E2M1_MAX = 6.0
"""Largest code's value."""

LEAST_GROUP_SCALE = 2.0**-6
"""Least normal e4m3: below it the steps between scales are too wide for a stable second store."""


@dataclass(frozen=True)
class Nvfp4DsMlaFormat(CacheFormat):
    """Rows of C / 2 bytes of codes, R e4m3 codes and C / 16 e4m3 scales: 256 + 64 + 32 bytes.

    Byte i holds latent 2i in its low half and 2i + 1 in its high half. A latent is code * group
    scale * k_scale, a number of the rotated key is code * k_scale. The group's scale is its largest
    absolute value / (6 * k_scale), rounded up to e4m3, 2^-6 at least and 448 at most: k_scale =
    largest latent / 2688 uses all of that range. NaN makes its group of 16 latents NaN (e2m1 has
    none), infinities saturate.

    Attributes:
        k_scale: a float32 value > 0 for which 2688 * k_scale is finite in `dtype`.
        v_scale: None or `k_scale`, which is the same: keys and values are one latent.
    """

    name: ClassVar[str] = "nvfp4_ds_mla"
    k_scale: float = 1.0
    v_scale: float | None = field(default=None, compare=False)

    def problems(self) -> list[str]:
        """List every reason why there are no such rows, scales included."""
        largest = largest_scale(self.dtype, E4M3_MAX * E2M1_MAX)
        found = super().problems()
        if self.kv_lora_rank % GROUP:
            found.append(
                f"kv_lora_rank is {self.kv_lora_rank}, accepted are multiples of {GROUP}: a scale "
                "serves that many"
            )
        return found + scale_problems(self.k_scale, self.v_scale, largest)

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """Latent, rope, scales."""
        half, rope = self.kv_lora_rank // 2, self.qk_rope_head_dim
        return (
            FormatPart("latent", torch.uint8, 0, half, per_element=2),
            FormatPart("rope", torch.float8_e4m3fn, half, rope),
            FormatPart("scales", torch.float8_e4m3fn, half + rope, self.kv_lora_rank // GROUP),
        )

    def quantise(self, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Scale each group of 16 and round; see `CacheFormat.quantise`."""
        groups = divide(finite_floats(kv_latent), self.k_scale).unflatten(1, (-1, GROUP))
        scale = _scale_codes(groups.abs().amax(-1))
        share = groups / decode_e4m3(scale, torch.float32)[..., None]
        codes = encode_e2m1(share).flatten(1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        rope = encode_e4m3(divide(k_rope.detach().to(torch.float32), self.k_scale))
        return torch.cat([packed, rope, scale], dim=1)

    def dequantise(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply each group by its scale; see `CacheFormat.dequantise`."""
        dtype = dtype or self.dtype
        wide = torch.promote_types(dtype, torch.float32)
        packed, rope, scales = (part.of(rows) for part in self.parts)
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        groups = decode_e2m1(codes, wide).unflatten(1, (-1, GROUP))
        # The first product is exact (2 and 4 significant bits), so there is one rounding.
        groups.mul_(decode_e4m3(scales, wide)[..., None])
        values = torch.cat([groups.flatten(1), decode_e4m3(rope, wide)], dim=1)
        return values.mul_(self.k_scale).to(dtype)


def encode_e2m1(values: Tensor) -> Tensor:
    """Round float32 values to codes 0 .. 15, uint8: nearest even, saturating; NaN gives 0."""
    size = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    # Halfway points between codes; ties go to the even code.
    for i, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        code += size >= middle if i % 2 else size > middle
    return (code + 8 * values.signbit()).masked_fill_(values.isnan(), 0).to(torch.uint8)


def decode_e2m1(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the values of codes 0 .. 15."""
    values = [*E2M1, *(-value for value in E2M1)]
    return torch.tensor(values, dtype=dtype, device=codes.device)[codes.long()]


def _scale_codes(largest: Tensor) -> Tensor:
    """Round largest / 6 up to an e4m3 code, 2^-6 .. 448; NaN gives NaN."""
    wanted = divide(largest, E2M1_MAX).clamp(LEAST_GROUP_SCALE, E4M3_MAX)
    code = encode_e4m3(wanted)
    code += (decode_e4m3(code, torch.float32) < wanted).to(torch.uint8)
    return code.masked_fill_(largest.isnan(), NAN_CODE)
