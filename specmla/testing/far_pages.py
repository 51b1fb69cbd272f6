"""A pool so large that a 32-bit page offset wraps, with a case's few pages at its far end."""

from __future__ import annotations

import dataclasses
import math
import os

import torch
from torch import Tensor

from specmla.testing.case import VerifyCase

SIGNED, UNSIGNED = 2**31, 2**32
"""Elements from which a signed and an unsigned 32-bit offset wrap."""

SPARE_PAGES = 200
SPARE_BYTES = 2**30
"""What the device must have left beyond the pool, for the call itself."""


class NoRoomError(Exception):
    """The device has no memory for a pool that large; the message says how much is missing."""


def move_far(case: VerifyCase) -> VerifyCase:
    """Give the case with its pages moved into a pool whose offsets pass 2^32 elements.

    Where memory is short the offsets pass 2^31 only. Pages alternate between just past 2^31 (and
    2^32) and the very end. The rest of the pool is NaN on a GPU; on a CPU it is never touched, so
    that it costs address space only.

    Raises:
        NoRoomError: not even 2^31 elements fit.
    """
    _, page, width = case.latent_cache.shape
    stride = page * width
    size = case.latent_cache.element_size()
    free = _free_bytes(case.latent_cache.device) - SPARE_BYTES
    limits = [n for n in (UNSIGNED, SIGNED) if (n + SPARE_PAGES * stride) * size <= free]
    if not limits:
        raise NoRoomError(
            f"a pool of 2^31 elements takes {SIGNED * size / 2**30:.1f} GiB, "
            f"{max(free, 0) / 2**30:.1f} GiB can be had"
        )
    num_pages = math.ceil(limits[0] / stride) + SPARE_PAGES
    past = [math.ceil(n / stride) for n in (SIGNED, UNSIGNED) if n <= limits[0]]
    pool = _pool(case.latent_cache, num_pages)
    moved: dict[int, int] = {}
    for r in case.requests:
        for block in r.block_ids:
            i = len(moved)
            moved[block] = num_pages - 1 - i if i % 2 else past[i // 2 % len(past)] + 1 + i
            pool[moved[block]] = case.latent_cache[block]
    requests = tuple(
        r._replace(block_ids=tuple(moved[block] for block in r.block_ids)) for r in case.requests
    )
    return dataclasses.replace(case, latent_cache=pool, requests=requests)


def _pool(like: Tensor, num_pages: int) -> Tensor:
    shape = (num_pages, *like.shape[1:])
    strides = (shape[1] * shape[2], shape[2], 1)
    pool = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    nan = math.nan if like.dtype.is_floating_point else 0xFF  # a byte of NaN in every format
    return pool if like.device.type == "cpu" else pool.fill_(nan)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 0
