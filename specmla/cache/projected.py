"""From the projection of a layer to cached rows: norm, rotation and store in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.cache.latent import LatentCache
from specmla.errors import require
from specmla.rope import RopeAngles


def store_projected(
    cache: LatentCache,
    layer: int,
    projected: Tensor,
    weight: Tensor,
    angles: RopeAngles,
    slots: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Write `[weight * c / rms(c) | RoPE(k)]` for each projected row `[c | k]`.

    By one kernel where the cache's operations are Triton's, else step by step in torch: what
    `RMSNorm`, `RopeAngles.rotate_key` and `LatentCache.store` do, up to rounding. The kernel rounds
    once, from float32.

    Args:
        cache: of plain rows.
        layer: 0 .. L - 1.
        projected: [T, C + R], what `kv_a_proj_with_mqa` gives, the cache's dtype.
        weight: [C], of the norm, the same dtype.
        angles: of the T positions.
        slots: [T] int64; rows with slot -1 are skipped.
        eps: of the norm, relative to the mean square.

    Returns:
        The pages of the layer, to be read after this.

    Raises:
        ArgumentError: a quantised cache, one of `as_operators`, or shapes, dtypes and devices that
            can't be accepted; nothing was written.
    """
    require(_problems(cache, projected, weight, angles, slots), "store_projected")
    pool, rank = cache.layer(layer), weight.shape[0]
    if cache.impl == "torch":
        latent, key = projected.split((rank, cache.width - rank), dim=-1)
        normed = torch.nn.functional.rms_norm(latent, (rank,), weight, eps)
        return cache.store(layer, normed, angles.rotate_key(key), slots)
    from specmla.kernels.store_projected import store_projected_rows

    store_projected_rows(
        pool,
        projected,
        weight,
        (angles.cos, angles.sin),
        slots,
        eps=eps,
        interleaved=angles.interleaved,
    )
    return pool


def _problems(
    cache: LatentCache, projected: Tensor, weight: Tensor, angles: RopeAngles, slots: Tensor
) -> list[str]:
    found = []
    if type(cache) is not LatentCache:  # its stores are operators of a compiled graph
        found.append(f"cache is a {type(cache).__name__}, accepted is a LatentCache")
    if cache.format is not None:
        found.append(f"cache holds {cache.format}, accepted are plain rows")
    if cache.impl == "triton" and cache.dtype == torch.float64:
        found.append("cache holds torch.float64, the kernel accepts up to 32 bits")
    for name, tensor, shape in (
        ("projected", projected, (slots.numel(), cache.width)),
        ("weight", weight, (weight.numel(),)),
        ("angles.cos", angles.cos, (slots.numel(), cache.width - weight.numel())),
    ):
        if tuple(tensor.shape) != shape or tensor.device != cache.device:
            found.append(
                f"{name} is {tuple(tensor.shape)} on {tensor.device}, accepted is {shape} on "
                f"{cache.device}"
            )
        elif tensor.numel() and not (name == "projected" or tensor.is_contiguous()):
            found.append(f"{name} has strides {tensor.stride()}, accepted are contiguous ones")
    if projected.dtype != cache.dtype or weight.dtype != cache.dtype:
        found.append(
            f"projected is {projected.dtype}, weight {weight.dtype}, accepted is {cache.dtype}"
        )
    if projected.numel() and projected.stride(-1) != 1:
        found.append(f"projected has strides {projected.stride()}, accepted is a last one of 1")
    if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != cache.device:
        found.append(
            f"slots is {tuple(slots.shape)} {slots.dtype} on {slots.device}, accepted is [T] "
            f"torch.int64 on {cache.device}"
        )
    return found
