"""What every row format of the latent cache says of itself, and how it turns rows into bytes."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from specmla.errors import count_problems, require

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that rows go in and come out in; float64 is for tests against the reference."""


@dataclass(frozen=True)
class FormatPart:
    """One run of equal elements in a row.

    Attributes:
        name: "latent", "rope" or "scales".
        dtype: of an element; of the byte, where one holds two values.
        offset: first byte, from the row's start.
        count: elements of that dtype.
        per_element: values that one element holds, 2 for e2m1.
    """

    name: str
    dtype: torch.dtype
    offset: int
    count: int
    per_element: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the run."""
        return self.count * self.dtype.itemsize

    def of(self, rows: Tensor) -> Tensor:
        """View the run in rows [n, bytes] uint8 as [n, count] of its dtype; may copy."""
        run = rows[:, self.offset : self.offset + self.num_bytes]
        return run.contiguous().view(self.dtype)


@dataclass(frozen=True)
class CacheFormat(abc.ABC):
    """How one token's A = C + R numbers lie in a row of a page.

    Attributes:
        kv_lora_rank: C, width of the latent.
        qk_rope_head_dim: R, width of the rotated key, any value >= 0.
        dtype: of the rows that are stored and that a gather gives.
        name: the word that selects it, for `cache_format`, `Capabilities.formats`.

    Raises:
        ArgumentError: names every field that can't be accepted.
    """

    name: ClassVar[str]
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Refuse what rows can't hold."""
        require(self.problems(), f"cache format {self.name!r}")

    def problems(self) -> list[str]:
        """List every reason why there are no such rows."""
        found = count_problems({"kv_lora_rank": self.kv_lora_rank})
        found += count_problems({"qk_rope_head_dim": self.qk_rope_head_dim}, 0)
        if self.dtype not in DTYPES:
            found.append(f"dtype is {self.dtype}, accepted are {[str(d) for d in DTYPES]}")
        return found

    @property
    def width(self) -> int:
        """A = C + R, numbers in a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[FormatPart, ...]:
        """Runs of a row, in the order of their bytes, without gaps."""

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token in one layer."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def alignment(self) -> int:
        """Bytes that divide a row's address: the largest element's size."""
        return max(part.dtype.itemsize for part in self.parts)

    @property
    def storage(self) -> tuple[torch.dtype, int]:
        """Dtype and columns of a pool's rows: bytes, unless the format is plain."""
        return torch.uint8, self.bytes_per_row

    def part(self, name: str) -> FormatPart:
        """Find a run by its name."""
        return next(part for part in self.parts if part.name == name)

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of a page of G tokens in one layer."""
        return page_size * self.bytes_per_row

    @abc.abstractmethod
    def quantise(self, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Turn latents [T, C] and rotated keys [T, R] into rows [T, columns] of `storage`.

        Rounds to nearest even and saturates: what is larger than a code, infinity included, becomes
        the largest one. Quantised formats compute in float32. What NaN becomes the format says.
        """

    @abc.abstractmethod
    def dequantise(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Turn rows [n, columns] of `storage` into numbers [n, A] of `dtype` (None: the format's).

        Code times scale is computed in float32, in float64 for a float64 `dtype`, and rounded once.
        Rows of zero bytes give zeros.
        """


def largest_scale(dtype: torch.dtype, largest_code: float) -> float:
    """Give the scale that keeps the largest code finite in float32 and in the rows' dtype.

    float32 alone decides where `dtype` is none that rows can have, which is refused elsewhere.
    """
    limits = [torch.finfo(kind).max for kind in (torch.float32, dtype) if kind in DTYPES]
    return min(limits) / largest_code


def scale_problems(k_scale: float, v_scale: float | None, largest: float) -> list[str]:
    """List why latents can't have these scales: one scale serves score and value.

    Args:
        k_scale: what a code is multiplied by, a number: a tensor may change later.
        v_scale: None, or the same value: there is one latent for both.
        largest: see `largest_scale`.
    """
    given = {"k_scale": k_scale} | ({} if v_scale is None else {"v_scale": v_scale})
    found = [
        f"{name} is {scale!r}, accepted are finite values > 0, as a number"
        for name, scale in given.items()
        if not isinstance(scale, Real)
        or isinstance(scale, bool)
        or not (math.isfinite(scale) and scale > 0)
    ]
    if found:
        return found
    if v_scale is not None and v_scale != k_scale:
        found.append(
            f"v_scale is {v_scale} and k_scale {k_scale}, accepted are equal ones: keys and values "
            "are one latent"
        )
    tiny = torch.finfo(torch.float32).tiny
    if not tiny <= k_scale <= largest:
        found.append(
            f"k_scale is {k_scale}, accepted are {tiny:.3g} .. {largest:.3g}: normal in float32 "
            "and without overflow of the largest code"
        )
    elif float(torch.tensor(k_scale, dtype=torch.float32)) != k_scale:
        near = float(torch.tensor(k_scale, dtype=torch.float32))
        found.append(f"k_scale is {k_scale!r}, accepted are float32 values such as {near!r}")
    return found


def byte_problems(
    format: CacheFormat, q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor
) -> list[str]:
    """List what a query ([T, H, C], [T, H, R]) and bytes [N, G, bytes] disagree on with a format.

    The shape of the pages is the caller's to check.
    """
    found = []
    dims, wanted = (
        (*q_latent.shape[-1:], *q_rope.shape[-1:]),
        (format.kv_lora_rank, format.qk_rope_head_dim),
    )
    if dims != wanted:
        found.append(f"the query is (C, R) = {dims} wide, accepted is {wanted}, that of {format}")
    if latent_cache.dtype != torch.uint8 or latent_cache.device != q_latent.device:
        found.append(
            f"latent_cache is {latent_cache.dtype} on {latent_cache.device}, accepted is "
            f"torch.uint8 on {q_latent.device}: the backend was built for {format.name!r}"
        )
    elif latent_cache.dim() == 3 and latent_cache.stride(2) != 1:
        found.append(
            f"latent_cache has strides {latent_cache.stride()}, accepted is a last stride of 1"
        )
    places = latent_cache.data_ptr(), *latent_cache.stride()[:-1]
    if any(place % format.alignment for place in places):
        found.append(
            f"latent_cache has strides {latent_cache.stride()} or an address that are no multiples "
            f"of {format.alignment} bytes, which {format.name!r} needs"
        )
    return found
