"""Queries as e4m3 codes: one row [latent | rope] a head, quantised in one operation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specmla.cache.formats.e4m3 import divide, encode_e4m3
from specmla.errors import require

Impl = Literal["triton", "torch"]
CODES = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Query:
    """Absorbed queries are round(q / scale) in e4m3, latent and rotated part alike.

    Rounds to nearest even and saturates at 448 * scale, infinities included; NaN stays NaN.

    Attributes:
        scale: what a code is multiplied by; a float32 value > 0.

    Raises:
        ArgumentError: another scale.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse scales that no query can have."""
        tiny = torch.finfo(torch.float32).tiny
        good = isinstance(self.scale, int | float) and math.isfinite(self.scale) and self.scale > 0
        good = good and tiny <= self.scale <= torch.finfo(torch.float32).max / 448.0
        if good:
            good = float(torch.tensor(self.scale, dtype=torch.float32)) == self.scale
        wrong = f"scale is {self.scale!r}, accepted are float32 values > 0, normal, 448 of them too"
        require([] if good else [wrong], "Fp8Query")

    def quantise(
        self, q_latent: Tensor, q_rope: Tensor, impl: Impl | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantise queries in one operation.

        Args:
            q_latent: [T, H, C]. q_rope: [T, H, R], of the same floating dtype; any strides.
            impl: "triton" (one kernel) or "torch". None means "triton" on CUDA devices.

        Returns:
            [T, H, C] and [T, H, R] float8_e4m3fn: views of one [T, H, C + R].
        """
        rank = q_latent.shape[-1]
        if (impl or ("triton" if q_latent.is_cuda else "torch")) == "triton":
            from specmla.kernels.quantise_query import quantise_query_rows

            latent, rope = (q if q.stride(-1) == 1 else q.contiguous() for q in (q_latent, q_rope))
            codes = quantise_query_rows(latent, rope, self.scale)
        else:
            query = torch.cat((q_latent, q_rope), -1).detach().to(torch.float32)
            codes = encode_e4m3(divide(query, self.scale))
        joined = codes.view(CODES)
        return joined[..., :rank], joined[..., rank:]

    def problems(self, q_latent: Tensor, q_rope: Tensor) -> list[str]:
        """List why tensors can't be queries of this form; their shapes are the caller's."""
        return [
            f"{name} is {q.dtype} of strides {q.stride()}, accepted is {CODES} with a last stride "
            f"of 1: the backend was built for {self}"
            for name, q in (("q_latent", q_latent), ("q_rope", q_rope))
            if q.dtype != CODES or (q.numel() and q.stride(-1) != 1)
        ]
