"""Drafts drawn within a graph: tokens, and what they were drawn from."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmla.verify.draw import sample
from specmla.verify.sampling import SamplingBatch, processed_probs
from specmla.verify.streams import Stream, uniforms


class DrawnDrafts(NamedTuple):
    """What a replay leaves, overwritten by the next one.

    Attributes:
        tokens: [B, K] int64, -1 past a request's count.
        probs: [B, K, W] float32, what they were drawn from, or None if all are greedy.
        besides: what the drafter's function gave.
    """

    tokens: Tensor
    probs: Tensor | None
    besides: Any = None


class CapturedSheet:
    """Columns of drafts while they are drawn, on the device alone.

    Args:
        batch: parameters of B requests.
        anchors: [B] int64, positions of their anchors.
        num_drafts: K.

    Attributes:
        tokens: [B, K] int64.
        probs: [B, K, W], or None in a greedy batch.
        width: K.
    """

    def __init__(self, batch: SamplingBatch, anchors: Tensor, num_drafts: int) -> None:
        self._batch, self.width, device = batch, num_drafts, anchors.device
        self._columns = torch.arange(num_drafts, device=device)
        self._rows = torch.arange(len(anchors), device=device)
        self.tokens = torch.empty(len(anchors), num_drafts, dtype=torch.int64, device=device)
        self.probs: Tensor | None = None
        if not batch.all_greedy:
            self._uniforms = uniforms(batch.seeds, anchors, self._columns, Stream.DRAFT)

    def live(self, column: int) -> int:
        """Count the rows that a column is drawn for: all, whatever each request's count."""
        return len(self.tokens)

    def fill(self, column: int, logits: Tensor) -> Tensor:
        """Choose the drafts [B] of a column from their logits [B, W]."""
        if self._batch.all_greedy:
            chosen = logits.argmax(dim=-1)
        else:
            drawn_from = processed_probs(logits, self._batch, self._rows).probs
            chosen = sample(drawn_from, self._uniforms[:, column])
            if self.probs is None:
                self.probs = drawn_from.new_empty(*self.tokens.shape, logits.shape[-1])
            self.probs[:, column] = drawn_from
        self.tokens[:, column] = chosen
        return chosen

    def cut(self, counts: Tensor, besides: Any = None) -> DrawnDrafts:
        """End each request's drafts at its count [B]."""
        self.tokens.masked_fill_(self._columns >= counts[:, None], -1)
        return DrawnDrafts(self.tokens, self.probs, besides)
