"""What a latent cache does to memory, by kernels or in torch, on plain rows or on bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.cache import rows
from specmla.cache.formats.base import CacheFormat

KERNEL_FORMATS: tuple[str, ...] = ()
"""Quantised formats that the store and gather kernels serve; torch serves all."""


class CacheOperations(NamedTuple):
    """store(pool, kv_latent, k_rope, slots), gather(pool, slots, out), move(src, dst) of rows and
    copy(src, dst) of pages, the last two in all layers.
    """

    store: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    gather: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    move: Callable[[Tensor, Tensor], None]
    copy: Callable[[Tensor, Tensor], None]


def cache_operations(
    layers: Sequence[Tensor], impl: str, format: CacheFormat | None
) -> CacheOperations:
    """Choose the operations on these layers.

    Args:
        layers: one [N, G, A] or [N, G, bytes] view each.
        impl: "triton" or "torch".
        format: None for plain rows.
    """
    if impl == "torch":
        move, copy = partial(rows.move_rows, layers), partial(rows.copy_pages, layers)
        if format is None:
            return CacheOperations(rows.store_rows, rows.gather_rows, move, copy)
        store, gather = partial(store_packed, format), partial(gather_packed, format)
        return CacheOperations(store, gather, move, copy)
    from specmla.kernels import gather as gathering
    from specmla.kernels import move as moving
    from specmla.kernels import store as storing

    table = moving.LayerTable.of(_as_words(layers))
    move, copy = partial(moving.move_rows, table), partial(moving.copy_pages, table)
    return CacheOperations(storing.store_rows, gathering.gather_rows, move, copy)


def store_packed(
    format: CacheFormat, pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor
) -> None:
    """Quantise rows ([T, C], [T, R]) and write them at `slots` [T] of `pool` [N, G, bytes]."""
    rows.put_rows(pool, format.quantise(kv_latent, k_rope), slots)


def gather_packed(
    format: CacheFormat, pool: Tensor, slots: Tensor, out: Tensor | None = None
) -> Tensor:
    """Read rows [n, A] at `slots` [n] of `pool` [N, G, bytes]; a negative slot gives zeros.

    The rows are read into `out` [n, A] if it is given.
    """
    found = format.dequantise(rows.gather_rows(pool, slots))
    return found if out is None else out.copy_(found)


def _as_words(layers: Sequence[Tensor]) -> Sequence[Tensor]:
    """View rows of bytes as rows of int32 where all rows are whole ones: a quarter of the loads."""
    first = layers[0]
    sizes = [first.shape[2], *first.stride()[:2], *(layer.data_ptr() for layer in layers)]
    if first.dtype != torch.uint8 or any(size % 4 for size in sizes):
        return layers
    return [layer.view(torch.int32) for layer in layers]
