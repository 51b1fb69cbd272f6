"""The drafts of one proposal while they are drawn: tokens, and what they were drawn from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specmla import DraftProposal, Stream, processed_probs, sample, uniforms

if TYPE_CHECKING:
    from torch import Tensor

    from specmla import DraftRequest, DrawnDrafts, SamplingCache


class Wanted(NamedTuple):
    """A request and how many tokens are drafted for it."""

    request: DraftRequest
    drafts: int

    @property
    def request_id(self) -> Hashable:
        """The engine's name of it."""
        return self.request.request_id


class DraftSheet:
    """Columns of drafts for `wanted`, requests by falling count; column i has those that want more
    than i, the first rows.

    Every token is drawn from the row reported for it, processed as the target's rows are. Greedy
    batches report nothing: their drafts are one-hot.

    Args:
        wanted: requests with at least one draft, by falling count.
        anchors: [B] int64, their anchors' positions, the key of the random numbers.
        vocab_size: W.
        sampling: keeps the parameters on the device.
    """

    def __init__(
        self, wanted: Sequence[Wanted], anchors: Tensor, vocab_size: int, sampling: SamplingCache
    ) -> None:
        device = anchors.device
        self._wanted, self._vocab_size = wanted, vocab_size
        self.width = max((n for _, n in wanted), default=0)
        self.tokens = torch.full((len(wanted), self.width), -1, dtype=torch.int64, device=device)
        self.probs: Tensor | None = None
        self._batch = sampling.get(r.sampling for r, _ in wanted)
        self._sampled = not self._batch.all_greedy
        if self._sampled:
            self._rows, columns = (torch.arange(n, device=device) for n in self.tokens.shape)
            self._uniforms = uniforms(self._batch.seeds, anchors, columns, Stream.DRAFT)

    def live(self, column: int) -> int:
        """Count the requests that draft in this column."""
        return sum(n > column for _, n in self._wanted)

    def fill(self, column: int, logits: Tensor) -> Tensor:
        """Choose the drafts [n] of a column from the logits [n, W] of its live rows."""
        count = len(logits)
        if not self._sampled:
            chosen = logits.argmax(dim=-1)
        else:
            drawn_from = processed_probs(logits, self._batch, self._rows[:count]).probs
            chosen = sample(drawn_from, self._uniforms[:count, column])
            if self.probs is None:
                shape = (*self.tokens.shape, self._vocab_size)
                self.probs = drawn_from.new_zeros(shape)
            self.probs[:count, column] = drawn_from
        self.tokens[:count, column] = chosen
        return chosen

    def proposal(self, others: Sequence[DraftRequest]) -> DraftProposal:
        """Give the proposal; `others` are requests without drafts."""
        names = [w.request_id for w in self._wanted] + [r.request_id for r in others]
        counts = [n for _, n in self._wanted] + [0] * len(others)
        tokens, probs = self.tokens, self.probs
        if others:
            tokens = torch.cat((tokens, tokens.new_full((len(others), self.width), -1)))
            if probs is not None:
                probs = torch.cat((probs, probs.new_zeros((len(others), *probs.shape[1:]))))
        return DraftProposal(tuple(names), tuple(counts), tokens, probs)


def drawn_proposal(
    wanted: Sequence[Wanted], others: Sequence[DraftRequest], drawn: DrawnDrafts
) -> DraftProposal:
    """Give the proposal of a captured draw, its rows those of `wanted`; a copy, to be kept."""
    count, width = len(wanted), wanted[0].drafts
    names = [w.request_id for w in wanted] + [r.request_id for r in others]
    counts = [w.drafts for w in wanted] + [0] * len(others)
    tokens = _copied(drawn.tokens[:count, :width], len(others), -1)
    probs = None if drawn.probs is None else _copied(drawn.probs[:count, :width], len(others), 0)
    return DraftProposal(tuple(names), tuple(counts), tokens, probs)


def _copied(rows: Tensor, missing: int, fill: int) -> Tensor:
    """Copy rows, and put `missing` ones of `fill` behind them."""
    if not missing:
        return rows.clone(memory_format=torch.contiguous_format)
    return torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))


def split_wanted(
    counts: Sequence[tuple[DraftRequest, int]],
) -> tuple[list[Wanted], list[DraftRequest]]:
    """Separate requests with drafts, by falling count, from those without."""
    wanted = [Wanted(r, n) for r, n in counts if n > 0]
    wanted.sort(key=lambda w: -w.drafts)
    return wanted, [r for r, n in counts if n <= 0]
