"""What a caller needs of a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specmla.backends.graph_support import GraphSupport
from specmla.cache.formats.base import CacheFormat
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.query_form import Fp8Query


@dataclass(frozen=True)
class Requirements:
    """What a caller needs of a backend, for `AttentionBackend.problems` and `select_backend`.

    `dtype` is that of the model: of queries, unless they have a form, and of attended rows. What
    other models do to scores (`alibi` slopes, a `sliding_window`, a `logits_soft_cap`, `sinks`) is
    asked for here to be refused by name.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    masks: frozenset[DraftMask] = frozenset({DraftMask.CAUSAL})
    query_len_support: QueryLenSupport = QueryLenSupport.SINGLE_ONLY
    batch_invariant: bool = False
    format: CacheFormat | None = None  # of the cache; None or plain for rows in `dtype`
    query_form: Fp8Query | None = None  # of absorbed queries; None for numbers in `dtype`
    lse: bool = False  # whether shards are merged
    graphs: GraphSupport = GraphSupport.NEVER  # verifies to be captured
    alibi: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
