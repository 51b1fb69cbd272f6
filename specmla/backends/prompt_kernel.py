"""What attends prompt rows over up-projected keys, in place of a backend's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.metadata import PrefillPart
from specmla.reference import merge_attention_states


class PromptKernel(Protocol):
    """One implementation of MHA with an LSE; values may be narrower or wider than keys."""

    @property
    def name(self) -> str:
        """The word that selects it."""
        ...

    def problems(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        """List why it can't run there."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> AttentionOutput:
        """Attend as `AttentionBackend.forward_mha` does; shapes have been checked."""
        ...


class Block(NamedTuple):
    """Requests of one shape: where their rows and keys lie, [B, Q] and [B, S] of them."""

    rows: slice
    keys: slice
    shape: tuple[int, int, int]


Square = Callable[[Tensor, Tensor, Tensor, bool], AttentionOutput]
"""Attends [B, Q, H, D] over [B, S, H, D] and [B, S, H, V], in full or, Q = S > 0, causally; gives
[B, Q, H, V] and its LSE [B, Q, H], float32 or, for float64, float64."""


def blocks_of(part: PrefillPart) -> Iterator[Block]:
    """Cut a part into requests, all at once if they have one shape."""
    queries, keys = part.query_lens, part.seq_lens
    if len(set(queries)) == 1 == len(set(keys)):
        shape = (len(queries), queries[0], keys[0])
        yield Block(slice(0, sum(queries)), slice(0, sum(keys)), shape)
        return
    row = at = 0
    for count, length in zip(queries, keys, strict=True):
        yield Block(slice(row, row + count), slice(at, at + length), (1, count, length))
        row, at = row + count, at + length


def attend_blocks(
    square: Square, query: Tensor, key: Tensor, value: Tensor, part: PrefillPart, *, causal: bool
) -> AttentionOutput:
    """Attend a part by calls that know no ragged batch and no causal mask but a square one.

    Rows before the last S see their context in full and each other causally: two calls, merged.
    """
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    for rows, keys, (num, count, length) in blocks_of(part):
        if not count or not length:
            continue
        unseeing = max(0, count - length) if causal else 0  # rows without a key stay empty
        q = query[rows].unflatten(0, (num, count))[:, unseeing:]
        k, v = (t[keys].unflatten(0, (num, length)) for t in (key, value))
        got = _causal(square, q, k, v) if causal else square(q, k, v, False)
        out[rows].unflatten(0, (num, count))[:, unseeing:] = got.out
        lse[rows].unflatten(0, (num, count))[:, unseeing:] = got.lse
    return AttentionOutput(out, lse)


def _causal(square: Square, query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
    """Attend the last rows of their keys, Q <= S."""
    count, context = query.shape[1], key.shape[1] - query.shape[1]
    if not context or count == 1:
        return square(query, key, value, count > 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    before = square(query, key[:, :context], value[:, :context], False)
    own = square(query, key[:, context:], value[:, context:], True)
    merged = merge_attention_states(
        before.out.flatten(0, 1).to(wide),
        before.lse.flatten(0, 1),
        own.out.flatten(0, 1).to(wide),
        own.lse.flatten(0, 1),
    )
    shape = query.shape[:2]
    return AttentionOutput(merged.out.unflatten(0, shape), merged.lse.unflatten(0, shape))
