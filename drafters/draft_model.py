"""A separate small MLA model as drafter, with its own paged cache.

The first round of a step runs the tokens that the draft cache has not seen yet (after a step in
which all drafts were accepted these are two: the last draft and the anchor), each further round one
drafted token. The last draft's row is never computed: if it is accepted, it is the next step's
first pending token.

After `capture` all of this is one CUDA graph. It holds two pending tokens: where there are more (a
prompt, steps without drafts in between) all but the last one are run before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from drafters.draft_cache import given_back_by_errors
from drafters.model_rounds import ModelRounds
from specmla import (
    Bucket,
    CapturedChains,
    DraftProposal,
    PendingRows,
    RequestKind,
    RequestRows,
    SamplingCache,
    SamplingParams,
    Stream,
    build_step,
    processed_probs,
    sample,
    uniforms,
)

if TYPE_CHECKING:
    from torch import Tensor

    from specmla import (
        DeepseekForCausalLM,
        DraftRequest,
        HiddenRows,
        RequestResult,
    )

CAPTURED_ROWS = 2
"""Pending tokens of a request that a graph holds: an accepted last draft, and the anchor."""


class DraftModelDrafter:
    """Drafts with a model of the target's vocabulary.

    Args:
        model: the draft model; may live on another dtype, page size and backend than the target.
        num_pages: pages of its pool.
        page_size: tokens a page.
        backend: attention backend by name, the best one if None.

    Raises:
        UnsupportedError: no backend can serve the model.
    """

    def __init__(
        self,
        model: DeepseekForCausalLM,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
    ) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        # Only the wiring of a step is used: cache, pages and builder, all the drafter's own.
        wired = build_step(
            model,
            num_pages=num_pages,
            page_size=page_size,
            backend=backend,
            prefix_caching=False,
        )
        self.cache, self.blocks, self.builder = wired.cache, wired.blocks, wired.builder
        self._tokens: dict[Hashable, array[int]] = {}
        self._drafted: dict[Hashable, tuple[int, int]] = {}
        self._sampling = SamplingCache(self.builder.device)
        self._chains: CapturedChains | None = None

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Draft by CUDA graphs from here on where a batch fits: see `CapturedChains` for all of it.

        The tokens are those of uncaptured drafts, but for what rounding decides: a prompt's last
        row is computed as one of a decode.
        """
        if self._chains is None or not self._chains.covers(buckets, sampling):
            rounds = ModelRounds(self.model, self.cache, self.builder.backend)
            self._chains = CapturedChains(self.builder, rounds, buckets, sampling, CAPTURED_ROWS)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Draft `num_drafts` tokens for each request, drawn from the reported distribution.

        Fewer, or none, where the draft model's own context ends. Requests stand in the proposal by
        falling number of drafts.

        Raises:
            PoolFullError: the draft pool is too small; nothing was reserved.
        """
        drafted = [(r, min(r.num_drafts, self._room(r))) for r in requests]
        # So sorted, the rows of a round are the first ones of the round before it.
        drafted.sort(key=lambda pair: -pair[1])
        names, counts = tuple(r.request_id for r, _ in drafted), tuple(n for _, n in drafted)
        drafted = [(r, n) for r, n in drafted if n]
        shape = (len(names), max(counts, default=0))
        tokens = torch.full(shape, -1, dtype=torch.int64, device=self.builder.device)
        probs = None
        if any(r.sampling.temperature > 0 for r, _ in drafted):
            dtype = torch.promote_types(self.cache.layer(0).dtype, torch.float32)
            probs = torch.zeros(*shape, self.vocab_size, dtype=dtype, device=self.builder.device)
        with given_back_by_errors(self.blocks, [r.request_id for r, _ in drafted]):
            self._reserve(drafted)
            if drafted and not self._replay(drafted, tokens, probs):
                self._draft(drafted, tokens, probs)
        self._drafted |= {r.request_id: (len(r.tokens), n) for r, n in drafted}
        return DraftProposal(names, counts, tokens, probs)

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Keep the rows of accepted drafts, roll the others back."""
        for result in results:
            drafted = self._drafted.pop(result.request_id, None)
            if drafted is None:
                continue
            length, count = drafted
            # Rows exist for all tokens up to the anchor, and for all drafts but the last one.
            kept = min(result.num_accepted, len(result.new_tokens), count - 1)
            tokens = self._tokens[result.request_id]
            tokens.extend(result.new_tokens)
            self.blocks.commit(result.request_id, length + kept, tokens)

    def reset(self, request_id: Hashable) -> None:
        """Give the pages of a request back."""
        self._drafted.pop(request_id, None)
        if self._tokens.pop(request_id, None) is not None:
            self.blocks.free(request_id)

    def _room(self, r: DraftRequest) -> int:
        """Drafts that fit the draft model's own context: the last one needs no row."""
        return max(0, self.builder.max_seq_len - len(r.tokens) + 1)

    def _reserve(self, requests: Sequence[tuple[DraftRequest, int]]) -> None:
        needs = {}
        for r, count in requests:
            if r.request_id not in self._tokens:
                self.blocks.add(r.request_id, r.tokens)
                self._tokens[r.request_id] = array("q")
            known = self._tokens[r.request_id]
            known.extend(r.tokens[len(known) :])  # a prompt, or steps that were not drafted for
            self._drafted.pop(r.request_id, None)
            pending = len(r.tokens) - self.blocks.length(r.request_id)
            needs[r.request_id] = pending + count - 1
        self.blocks.reserve(needs)

    @torch.inference_mode()
    def _replay(
        self, drafted: Sequence[tuple[DraftRequest, int]], tokens: Tensor, probs: Tensor | None
    ) -> bool:
        """Do what `_draft` does by a graph; tell whether one was captured that holds the batch."""
        if self._chains is None:
            return False
        batch = self._sampling.get(r.sampling for r, _ in drafted)
        graph = self._chains.find([n for _, n in drafted], batch)
        if graph is None:
            return False
        behind, pending = [], []
        for r, n in drafted:
            known, name = r.tokens, r.request_id
            fed = len(known) - self.blocks.length(name)
            if fed > CAPTURED_ROWS:
                behind.append(r._replace(tokens=known[:-1]))
                fed = 1
            pages = self.blocks.block_ids(name)
            rows = RequestRows(RequestKind.VERIFY, fed, len(known), pages)
            pending.append(PendingRows(rows, known[-fed:], n, len(known) - 1))
        if behind:
            self._first_round(behind)
        drawn = self._chains.draft(graph, pending, batch)
        count, width = len(drafted), tokens.shape[1]
        tokens[:count] = drawn.tokens[:count, :width]
        if probs is not None and drawn.probs is not None:
            probs[:count] = drawn.probs[:count, :width]
        return True

    @torch.inference_mode()
    def _draft(
        self, drafted: Sequence[tuple[DraftRequest, int]], tokens: Tensor, probs: Tensor | None
    ) -> None:
        """Run the rounds; round i fills column i of tokens [B, K] and of probs [B, K, W]."""
        hidden, anchors = self._first_round([r for r, _ in drafted])
        if probs is not None:
            batch = self._sampling.get(r.sampling for r, _ in drafted)
            rows, columns = (torch.arange(n, device=anchors.device) for n in tokens.shape)
            u = uniforms(batch.seeds, anchors, columns, Stream.DRAFT)
        rounds = self.builder.build_rounds([self._later_rows(r, n) for r, n in drafted if n > 1])
        for i in range(tokens.shape[1]):
            if i:
                token_ids = tokens[: rounds[i - 1].num_rows, i - 1]
                hidden = self.model(token_ids, rounds[i - 1], self.cache, self.builder.backend)
            logits, count = self.model.logits(hidden), hidden.shape[0]
            if probs is None:
                tokens[:count, i] = logits.argmax(dim=-1)
            else:
                drawn_from = processed_probs(logits, batch, rows[:count]).probs
                tokens[:count, i] = sample(drawn_from, u[:count, i])
                probs[:count, i] = drawn_from

    def _first_round(self, requests: Sequence[DraftRequest]) -> tuple[Tensor, Tensor]:
        """Run all pending tokens; give the anchors' hidden states [B, D] and positions [B]."""
        rows = [self._first_rows(r) for r in requests]
        # As the metadata orders them: verifies, then prompts.
        order = sorted(range(len(rows)), key=lambda i: rows[i].kind is RequestKind.PROMPT)
        pending, last = array("q"), array("q", [0]) * len(rows)
        for i in order:
            pending.extend(requests[i].tokens[-rows[i].query_len :])
            last[i] = len(pending) - 1
        metadata = self.builder.build(
            [rows[i] for i in order],
            along={
                "pending": pending,
                "last": last,
                "anchors": array("q", [len(r.tokens) - 1 for r in requests]),
            },
        )
        # Ids that only the target knows (where that is allowed) can't be looked up; whatever stands
        # for them, the reported distribution is the one drawn from.
        token_ids = metadata.along["pending"].clamp(max=self.vocab_size - 1)
        hidden = self.model(token_ids, metadata, self.cache, self.builder.backend)
        return hidden[metadata.along["last"]], metadata.along["anchors"]

    def _first_rows(self, r: DraftRequest) -> RequestRows:
        """All pending tokens; a prompt is computed by MHA, a catch-up after a step by decode."""
        length = self.blocks.length(r.request_id)
        kind = RequestKind.VERIFY if length else RequestKind.PROMPT
        pages = self.blocks.block_ids(r.request_id)
        return RequestRows(kind, len(r.tokens) - length, len(r.tokens), pages)

    def _later_rows(self, r: DraftRequest, count: int) -> RequestRows:
        """All drafts but the last one, which needs no row."""
        pages = self.blocks.block_ids(r.request_id)
        return RequestRows(RequestKind.VERIFY, count - 1, len(r.tokens) + count - 1, pages)
