"""Cached rows as the codes that they are, for who multiplies codes and scales the products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specmla.cache import rows
from specmla.cache.formats.fp8 import Fp8Format
from specmla.cache.latent import LatentCache
from specmla.errors import require

CODES = torch.float8_e4m3fn


def code_scale(cache: LatentCache) -> float | None:
    """Give what every code of a cache's rows is multiplied by; None if rows have no one scale."""
    return cache.format.k_scale if isinstance(cache.format, Fp8Format) else None


def row_reader(
    cache: LatentCache, layer: int, *, codes: bool
) -> tuple[Callable[[Tensor, Tensor | None], Tensor], float]:
    """Give what reads a layer's rows at (slots, memory), and what these are to be multiplied by.

    With `codes` they are read as codes where the format allows, as numbers elsewhere (by 1).
    """
    scale = code_scale(cache) if codes else None
    if scale is None:
        return partial(cache.gather, layer), 1.0
    return partial(gather_codes, cache, layer), scale


def gather_codes(
    cache: LatentCache, layer: int, slots: Tensor, memory: Tensor | None = None
) -> Tensor:
    """Read e4m3 codes [n, A] at `slots` [n] int64 of a cache in format "fp8"; slot -1 gives zeros.

    Args:
        cache: whose codes times `code_scale` are the numbers that `LatentCache.gather` gives.
        layer: 0 .. L - 1.
        slots: [n] int64.
        memory: contiguous, on the cache's device; the codes fill its first n * A bytes.

    Raises:
        ArgumentError: a cache of another format, slots or memory that can't be taken.
    """
    shape, found = (slots.numel(), cache.width), cache.slot_problems("slots", slots)
    if code_scale(cache) is None:
        name = cache.format.name if cache.format else "plain"
        found.append(f"format is {name!r}, accepted is 'fp8': one scale for all rows")
    size = shape[0] * shape[1]
    if memory is not None and (
        not memory.is_contiguous() or memory.device != cache.device or memory.nbytes < size
    ):
        found.append(
            f"memory has {memory.nbytes} bytes, strides {memory.stride()} on {memory.device}, "
            f"accepted are {size} or more, contiguous, on {cache.device}"
        )
    require(found, "gather_codes")
    out = None if memory is None else memory.view(-1).view(torch.uint8)[:size].view(shape)
    if cache.impl == "torch":
        return rows.gather_rows(cache.layer(layer), slots, out).view(CODES)
    from specmla.kernels.gather import gather_rows

    return gather_rows(cache.layer(layer), slots, out).view(CODES)
