"""What the reference backend relies on, checked before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.backends.gather import GatherPlan
from specmla.cache.formats.base import CacheFormat, byte_problems
from specmla.metadata import PrefillPart, VerifyPart

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of query and cache."""


def mqa_problems(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    format: CacheFormat | None,
) -> list[str]:
    """List every shape, dtype or plan that `forward_mqa` can't take."""
    if format is None:
        found = _tensor_problems(q_latent=q_latent, q_rope=q_rope, latent_cache=latent_cache)
    else:
        found = _tensor_problems(q_latent=q_latent, q_rope=q_rope)
        found += byte_problems(format, q_latent, q_rope, latent_cache)
    if q_latent.dim() == 0 or q_rope.dim() == 0:
        return [*found, "q_latent and q_rope have no dimension, accepted are three"]
    if q_latent.dim() != 3 or q_latent.shape[0] != part.num_rows or not q_latent.shape[1]:
        found.append(f"q_latent is {tuple(q_latent.shape)}, accepted is [T={part.num_rows}, H, C]")
    if q_rope.dim() != 3 or q_rope.shape[:2] != q_latent.shape[:2]:
        found.append(
            f"q_rope is {tuple(q_rope.shape)}, accepted is {tuple(q_latent.shape[:2])} + R"
        )
    width = format.bytes_per_row if format else q_latent.shape[-1] + q_rope.shape[-1]
    if latent_cache.dim() != 3 or latent_cache.shape[1:] != (part.page_size, width):
        found.append(
            f"latent_cache is {tuple(latent_cache.shape)}, accepted is "
            f"[N, G={part.page_size}, {'bytes' if format else 'C + R'}={width}]"
        )
    if (
        isinstance(part.plan, GatherPlan)
        and q_latent.dim() == 3
        and q_latent.shape[1] != part.plan.num_heads
    ):
        found.append(
            f"q_latent has {q_latent.shape[1]} heads, the step was planned for "
            f"{part.plan.num_heads}"
        )
    sees_nothing = not part.num_rows or not part.max_seq_len
    if not isinstance(part.plan, GatherPlan) and not (part.plan is None and sees_nothing):
        found.append(f"part.plan is {type(part.plan).__name__}, accepted is what plan() gives")
    return found


def mha_problems(query: Tensor, key: Tensor, value: Tensor, part: PrefillPart) -> list[str]:
    """List every shape or dtype that `forward_mha` can't take."""
    rows, keys = sum(part.query_lens), sum(part.seq_lens)
    found = _tensor_problems(query=query, key=key, value=value)
    if query.dim() != 3 or query.shape[0] != rows:
        found.append(f"query is {tuple(query.shape)}, accepted is [T={rows}, H, P + R]")
    if key.shape != (keys, *query.shape[1:]):
        found.append(f"key is {tuple(key.shape)}, accepted is {(keys, *query.shape[1:])}")
    if value.dim() != 3 or value.shape[:2] != key.shape[:2]:
        found.append(f"value is {tuple(value.shape)}, accepted is {tuple(key.shape[:2])} + V")
    return found


def _tensor_problems(**tensors: Tensor) -> list[str]:
    found: list[str] = []
    accepted, first = DTYPES, next(iter(tensors.values()))
    if first.dtype in accepted and all(
        t.dtype == first.dtype and t.device == first.device for t in tensors.values()
    ):
        return found
    dtypes = {name: str(t.dtype) for name, t in tensors.items()}
    if len(set(dtypes.values())) > 1 or first.dtype not in accepted:
        found.append(f"dtypes are {dtypes}, accepted is one dtype of {[str(d) for d in accepted]}")
    devices = {name: str(t.device) for name, t in tensors.items()}
    if len(set(devices.values())) > 1:
        found.append(f"devices are {devices}, accepted is one device")
    return found
