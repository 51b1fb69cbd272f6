"""What a latent cache does to memory, by kernels or in torch, on plain rows or on bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.cache import rows
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.fp8 import Fp8Format
from specmla.cache.formats.fp8_ds_mla import GROUP
from specmla.cache.formats.fp8_per_token_head import Fp8PerTokenHeadFormat
from specmla.cache.formats.nvfp4_ds_mla import Nvfp4DsMlaFormat
from specmla.kernels.fp8_rows import Fp8Rows

FP8_FORMATS = ("fp8", "fp8_ds_mla", "fp8_per_token_head")
"""Quantised formats of e4m3 latents, which the attention kernels read."""

KERNEL_FORMATS = (*FP8_FORMATS, "nvfp4_ds_mla")
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
    if format is None:
        return CacheOperations(storing.store_rows, gathering.gather_rows, move, copy)
    write, read = _packed_kernels(format)
    return CacheOperations(write, partial(gather_by_kernel, read, format), move, copy)


def _packed_kernels(
    format: CacheFormat,
) -> tuple[Callable[[Tensor, Tensor, Tensor, Tensor], None], Callable[..., Tensor]]:
    """Give store(pool, kv_latent, k_rope, slots) and gather(pool, slots, out) of a format."""
    if isinstance(format, Nvfp4DsMlaFormat):
        from specmla.kernels.gather_nvfp4 import gather_nvfp4_rows
        from specmla.kernels.store_nvfp4 import Nvfp4Rows, store_nvfp4_rows

        rows_of = Nvfp4Rows(format.kv_lora_rank, format.qk_rope_head_dim, format.k_scale)
        return partial(store_nvfp4_rows, rows_of), partial(gather_nvfp4_rows, rows_of)
    from specmla.kernels.gather_fp8 import gather_fp8_rows
    from specmla.kernels.store_fp8 import store_fp8_rows

    form = fp8_rows(format)
    return partial(store_fp8_rows, form), partial(gather_fp8_rows, form)


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


def gather_by_kernel(
    read: Callable[..., Tensor],
    format: CacheFormat,
    pool: Tensor,
    slots: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Read rows as `gather_packed` does, by the kernel `read`."""
    if out is None:
        shape = (slots.shape[0], format.width)
        out = torch.empty(shape, dtype=format.dtype, device=pool.device)
    return read(pool, slots, out)


def fp8_rows(format: CacheFormat) -> Fp8Rows:
    """Tell the kernels where codes and scales of a format of `FP8_FORMATS` lie."""
    if isinstance(format, Fp8Format):
        return Fp8Rows(format.width, scale=format.k_scale)
    scales_at = format.part("scales").offset // 4
    if isinstance(format, Fp8PerTokenHeadFormat):
        return Fp8Rows(format.width, format.width, scales_at, copies=2)
    rope_at = format.part("rope").offset // 2
    return Fp8Rows(format.kv_lora_rank, GROUP, scales_at, rope_at=rope_at)


def _as_words(layers: Sequence[Tensor]) -> Sequence[Tensor]:
    """View rows of bytes as rows of int32 where all rows are whole ones: a quarter of the loads."""
    first = layers[0]
    sizes = [first.shape[2], *first.stride()[:2], *(layer.data_ptr() for layer in layers)]
    if first.dtype != torch.uint8 or any(size % 4 for size in sizes):
        return layers
    return [layer.view(torch.int32) for layer in layers]
