"""Rotary positions of MLA: one angle table a step, shared by all layers and by queries and key.

Pair i of the R rotated values turns by the angle `position * inv_freq[i]`:

    x'[a] = x[a] cos - x[b] sin        x'[b] = x[b] cos + x[a] sin

with (a, b) = (2i, 2i + 1) for interleaved weights and (i, i + R / 2) for halves. Both are computed
as `x * cos + x[partner] * sin`, the sign folded into `sin`, so rotated values stay where they were
and the two forms differ by a permutation only. YaRN (arXiv 2309.00071, section 3) slows the pairs
that turn rarely within the original context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.config import MLAConfig, YarnScaling


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """The angles of the rows of a step.

    Attributes:
        cos, sin: [..., R], float32 (float64 for float64 models), YaRN's factor included.
        cos_heads, sin_heads: the same as [..., 1, R], made once so that no layer does.
        partner: [R] int64, index of the other value of each pair.
        interleaved: pairs are (2i, 2i + 1), else (i, i + R / 2): what `partner` says.
    """

    cos: Tensor
    sin: Tensor
    cos_heads: Tensor
    sin_heads: Tensor
    partner: Tensor
    interleaved: bool = True

    def rotate_key(self, key: Tensor) -> Tensor:
        """Rotate `[..., R]`, one row a position; the result has the dtype of `key`."""
        return self._rotate(key, self.cos, self.sin)

    def rotate_query(self, query: Tensor) -> Tensor:
        """Rotate `[..., H, R]`, all heads of a row by the same angles."""
        return self._rotate(query, self.cos_heads, self.sin_heads)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = torch.addcmul(x * cos, x.index_select(-1, self.partner), sin)
        return turned if turned.dtype == x.dtype else turned.to(x.dtype)


class RotaryEmbedding:
    """Makes `RopeAngles` from positions; the frequencies are computed once, in float64.

    Angles come from the positions directly, not from a table of positions: there is no longest
    position and nothing to look up outside of.
    """

    def __init__(self, config: MLAConfig) -> None:
        self._dim, self._interleave = config.qk_rope_head_dim, config.rope_interleave
        scaling = config.rope_scaling
        self._factor = scaling.rotary_factor if scaling else 1.0
        self.inv_freq = rotary_frequencies(self._dim, config.rope_theta, scaling)
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def at(self, positions: Tensor, dtype: torch.dtype) -> RopeAngles:
        """Give the angles at `positions` [...] (any integer dtype) for rows of `dtype`."""
        inv_freq, sign, partner = self._constants(positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        pair = positions.unsqueeze(-1) * inv_freq
        cos, sin = (pair.cos() * self._factor).to(wide), (pair.sin() * self._factor).to(wide)
        sin = sin * sign.to(wide)
        return RopeAngles(cos, sin, cos.unsqueeze(-2), sin.unsqueeze(-2), partner, self._interleave)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Frequency, sign and partner of each of the R values, copied to a device once."""
        if device not in self._on_device:
            half = self._dim // 2
            index = torch.arange(self._dim, device="cpu")
            if self._interleave:
                pair, first, partner = index // 2, index % 2 == 0, index ^ 1
            else:
                pair, first = index % max(half, 1), index < half
                partner = torch.where(first, index + half, index - half)
            sign = torch.where(first, -1.0, 1.0)
            constants = (self.inv_freq[pair], sign, partner)
            self._on_device[device] = tuple(c.to(device) for c in constants)  # type: ignore[assignment]
        return self._on_device[device]


def rotary_frequencies(dim: int, theta: float, scaling: YarnScaling | None) -> Tensor:
    """Give the R / 2 angular frequencies as float64 [R / 2], on the CPU."""
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    plain = theta ** (-steps / max(dim, 1))
    if scaling is None or dim == 0:
        return plain
    low, high = (
        _turning_dim(turns, dim, theta, scaling.original_max_position_embeddings)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(
        0, 1
    )
    return plain * (1 - ramp) + plain / float(scaling.factor) * ramp


def _turning_dim(turns: float, dim: int, theta: float, context: int) -> float:
    """Dimension whose pair turns `turns` times within `context` tokens."""
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
