"""FlashMLA's dense decode operator for Hopper: where it is, what it takes, what it gives.

    dense_decode_fwd(q [B, Q, H, A], cache [N, 64, 1, A], C, seq_lens, block_table, scale, causal,
                     schedule | None, splits | None)
        -> (out [B, Q, H, C], lse [B, H, Q], schedule, splits)

It knows one Q a batch; a causal row counts from its request's last key. The first call of a step
makes the schedule, later ones take it. LSE is natural log, +inf for a row without keys.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.backends.peer_library import PeerLibrary

PAGE_SIZE = 64
DTYPES = (torch.bfloat16, torch.float16)
RANK, ROPE_DIM = 512, 64
CAPABILITY, ARCH = (9, 0), "sm_90"
OPERATOR = "dense_decode_fwd"

Operator = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


class Schedule(NamedTuple):
    """What the first call of a step makes and later ones take."""

    tiles: Tensor
    splits: Tensor


def flashmla_library(option: str, file: Path | None = None, hint: str = "") -> PeerLibrary:
    """Describe the library that has the operator; it comes with the package sgl-flash-mla."""
    return PeerLibrary(
        option=option,
        package="flash_mla",
        member="_C_legacy.abi3.so",
        namespace="flash_mla_legacy",
        file=file,
        hint=hint,
    )


def dense_decode(
    operator: Operator,
    query: Tensor,
    latent_cache: Tensor,
    tables: tuple[Tensor, Tensor],
    *,
    softmax_scale: float,
    causal: bool,
    rank: int = RANK,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Schedule]:
    """Call the operator.

    Args:
        operator: itself.
        query: [B, Q, H, A], latent then rope. latent_cache: [N, 64, A].
        tables: lengths [B] and block table [B, M], int32.
        softmax_scale: of the scores. causal: aligned bottom right; else each row sees all keys.
        rank: C.
        schedule: of the step's first call, or None to make it.

    Returns:
        out [B, Q, H, C], LSE [B, H, Q] and the schedule.
    """
    tiles, splits = schedule or (None, None)
    cache = latent_cache.unsqueeze(2)
    out, lse, tiles, splits = operator(
        query, cache, rank, *tables, softmax_scale, causal, tiles, splits
    )
    return out, lse, Schedule(tiles, splits)
