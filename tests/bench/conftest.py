"""Stand-ins for the peers' operator libraries: their schemas to the letter, plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

FLASHMLA_SCHEMA = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, "
    "Tensor block_table, float softmax_scale, bool is_causal, "
    "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
)
FA3_SCHEMA = (
    "fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, "
    "Tensor(b!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA_SCHEMA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> Tensor"
)
FLASHMLA_SPACE, FA3_SPACE = "specmla_fake_flashmla", "specmla_fake_fa3"


def attend(
    query: Tensor, keys: Tensor, rank: int, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Rows [Q, H, A] over keys [S, A]: out [Q, H, C] and LSE [Q, H], causal from the last key."""
    score = torch.einsum("qha,sa->qhs", query.double(), keys.double()) * scale
    if causal:
        rows, length = query.shape[0], keys.shape[0]
        last = torch.arange(rows)[:, None] + length - rows
        score = score.masked_fill((torch.arange(length) > last)[:, None], -math.inf)
    out = torch.einsum("qhs,sc->qhc", score.softmax(-1), keys[:, :rank].double())
    return out.to(query), score.logsumexp(-1).float()


def pages_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Rows [S, D] of one request; cells past its pages must be valid page ids all the same."""
    assert int(table.min()) >= 0
    assert int(table.max()) < cache.shape[0]
    return cache[table.long()].flatten(0, 1)[:length, 0]


def flashmla(*args: Any) -> tuple[Tensor, ...]:
    """FlashMLA's contract: a schedule comes with the first call and is taken by later ones."""
    q, cache, rank, seq_lens, table, scale, causal, schedule, splits = args
    if schedule is None:
        schedule, splits = seq_lens.clone(), seq_lens.new_zeros(seq_lens.shape[0] + 1)
    assert torch.equal(schedule, seq_lens)
    assert splits is not None
    found = [
        attend(rows, pages_of(cache, cells, int(n)), rank, scale, causal=causal)
        for rows, cells, n in zip(q, table, seq_lens, strict=True)
    ]
    out, lse = (torch.stack(parts) for parts in zip(*found, strict=True))
    return out, lse.transpose(1, 2).contiguous(), schedule.clone(), splits.clone()


def fa3(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """FA3's contract: what it must not be given is None, the metadata is that of these lengths."""
    q_v, starts, lens, table = rest[2], rest[4], rest[8], rest[11]
    scale, causal, metadata = rest[20], rest[21], rest[26]
    absent = [*rest[:2], rest[3], *rest[5:8], *rest[12:20], rest[28], rest[30], rest[33]]
    assert absent == [None] * len(absent)
    assert torch.equal(metadata, lens)
    at = starts.tolist()
    found = []
    for i, cells in enumerate(table):
        rows = slice(at[i], at[i + 1])
        value, key = (pages_of(cache, cells, int(lens[i])) for cache in (v, k))
        query = torch.cat([q_v[rows], q[rows]], dim=-1)
        keys = torch.cat([value, key], dim=-1)
        found.append(attend(query, keys, v.shape[-1], scale, causal=causal))
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return [out, lse.transpose(0, 1).contiguous(), out.new_empty(0), out.new_empty(0)]


@pytest.fixture(scope="session")
def peer_operators() -> Iterator[None]:
    """Both libraries, registered with torch under names of their own."""
    first = torch.library.Library(FLASHMLA_SPACE, "DEF")
    first.define(FLASHMLA_SCHEMA)
    first.impl("dense_decode_fwd", flashmla, "CPU")
    second = torch.library.Library(FA3_SPACE, "DEF")
    second.define(FA3_SCHEMA)
    second.impl("fwd", fa3, "CPU")
    second.define(METADATA_SCHEMA)
    second.impl("get_scheduler_metadata", lambda *args: args[8].clone(), "CPU")
    yield
    first._destroy()
    second._destroy()
