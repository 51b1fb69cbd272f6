"""EAGLE-3 as drafter: a head on three fused hidden states, with its own cache and vocabulary.

Row i is that of (h_i, t_{i+1}). A step first runs the rows whose true h are known since the last
one, in place of what was drafted there on the head's own states; the last of them gives the first
draft. Rows of drafts are given back at once. The head draws from its part of the vocabulary, and
that is what it reports: the ids that could be drawn, each with its probability.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drafters.draft_cache import DraftCache, given_back_by_errors
from drafters.eagle3_config import check_eagle3
from drafters.sheet import DraftSheet, Wanted, drawn_proposal, split_wanted
from drafters.state_graphs import StateGraphs, StateRounds
from drafters.state_log import StateLog
from specmla import (
    DraftMask,
    DraftProposal,
    QueryLenSupport,
    RequestKind,
    RequestRows,
    SamplingCache,
    SparseProbs,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3_model import Eagle3Model
    from specmla import (
        Bucket,
        DeepseekForCausalLM,
        DraftRequest,
        HiddenRows,
        RequestResult,
        SamplingParams,
    )

MOST_DRAFTS = 64


class Eagle3Drafter:
    """Drafts chains with one head, used again for every depth.

    Args:
        model: the target, which lends its embedding.
        draft: the head with an MLA layer, on the same device.
        num_pages, page_size: of the drafter's own pool.
        backend: attention backend by name, the best one if None.

    Raises:
        ArgumentError: the head's layer is a grouped-query one.
        CheckpointError: a head made for another target.
        UnsupportedError: no backend can serve it.
    """

    _graphs: StateGraphs | None = None

    def __init__(
        self,
        model: DeepseekForCausalLM,
        draft: Eagle3Model,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
    ) -> None:
        config = draft.config
        check_eagle3(config, model.config, type(self).__name__)
        weight = draft.fc.weight
        self.model, self.draft = model, draft
        self.vocab_size, self.hidden_layers = config.vocab_size, config.target_layer_ids
        self.cache = DraftCache(
            config.mla,
            1,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=model.config.max_position_embeddings + MOST_DRAFTS,
            mask=DraftMask.CAUSAL,
            dtype=weight.dtype,
            device=weight.device,
            backend=backend,
            query_len_support=QueryLenSupport.VARLEN,
        )
        self._sampling = SamplingCache(weight.device)
        self._log = StateLog()
        network = StateRounds(self._first, self._later, draft.logits)
        width = len(config.target_layer_ids) * model.config.attention.hidden_size
        states = model.model.embed_tokens.weight.new_empty(0, width)
        self._graphs = StateGraphs(self.cache.builder, network, self._log, states, self._sampling)

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Draft by CUDA graphs from here on where a batch fits, see `CapturedChains`."""
        assert self._graphs is not None
        self._graphs.capture(buckets, sampling, windows=False)

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Draft for each request whose last hidden states are known; none for others.

        Raises:
            PoolFullError: the drafter's pool is too small; nothing was reserved.
        """
        wanted, others = split_wanted(
            [(r, r.num_drafts * self._log.is_ready(r.request_id, r.tokens)) for r in requests]
        )
        if not wanted:
            empty = torch.empty(len(others), 0, dtype=torch.int64, device=self.cache.rows.device)
            return DraftProposal(tuple(r.request_id for r in others), (0,) * len(others), empty)
        self._log.renew(w.request_id for w in wanted)
        runs = [self._log[w.request_id] for w in wanted]
        names = [w.request_id for w in wanted]
        pages = given_back_by_errors(self.cache.blocks, names)
        with self._log.undone_by_errors(names), pages:
            more = [r.num_pending + w.drafts - 1 for w, r in zip(wanted, runs, strict=True)]
            self.cache.reserve(dict(zip(names, more, strict=True)))
            proposal = self._replay(wanted, others) or self._draft(wanted, others)
        for name, run in zip(names, runs, strict=True):
            self.cache.keep(name, run.num_known)
        return self._mapped(proposal)

    def _replay(
        self, wanted: Sequence[Wanted], others: Sequence[DraftRequest]
    ) -> DraftProposal | None:
        """Draft by a graph, if one was captured that holds the requests."""
        if self._graphs is None:
            return None
        drawn = self._graphs.run(wanted, [self._pending_rows(w) for w in wanted])
        return None if drawn is None else drawn_proposal(wanted, others, drawn)

    def _draft(self, wanted: Sequence[Wanted], others: Sequence[DraftRequest]) -> DraftProposal:
        """Draft round by round."""
        state, anchors = self._first_round(wanted)
        sheet = DraftSheet(wanted, anchors, self.draft.config.draft_vocab_size, self._sampling)
        chosen = sheet.fill(0, self.draft.logits(state))
        deep = [w for w in wanted if w.drafts > 1]
        for depth, tables in enumerate(self._later_rounds(deep) if deep else (), start=1):
            count = tables.num_rows
            state = self._later(chosen[:count], state[:count], tables)
            chosen = sheet.fill(depth, self.draft.logits(state))
        return sheet.proposal(others)

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Keep the target's states of what was committed."""
        for request_id in self._log.observe(results, hidden):
            self.cache.drop(request_id)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request and give its pages back."""
        self._log.forget(request_id)
        self.cache.drop(request_id)

    def _first_round(self, wanted: Sequence[Wanted]) -> tuple[Tensor, Tensor]:
        """Run the rows of known states; give the last ones' output [B, D] and the anchors [B]."""
        order = sorted(range(len(wanted)), key=lambda i: self._is_new(wanted[i]))
        tokens, last = array("q"), array("q", [0]) * len(wanted)
        for i in order:
            tokens.extend(wanted[i].request.tokens[-self._log[wanted[i].request_id].num_pending :])
            last[i] = len(tokens) - 1
        anchors = array("q", [len(w.request.tokens) - 1 for w in wanted])
        along = {"tokens": tokens, "last": last, "anchors": anchors}
        tables = self._first_tables([wanted[i] for i in order], along)
        states = self._log.take(wanted[i].request_id for i in order)
        out = self._first(tables.along["tokens"], states, tables)
        return out[tables.along["last"]], tables.along["anchors"]

    def _is_new(self, wanted: Wanted) -> bool:
        """Tell whether nothing is cached of a request."""
        run = self._log[wanted.request_id]
        return run.stored == run.first

    def _first_tables(self, ordered: Sequence[Wanted], along: Mapping[str, array[int]]) -> Any:
        """Give the tables of the rows of known states, new requests' last.

        The last row of a request is the one before the anchor's: its token is the anchor.
        """
        return self.cache.builder.build([self._pending_rows(w) for w in ordered], along=along)

    def _pending_rows(self, wanted: Wanted) -> RequestRows:
        run, pages = self._log[wanted.request_id], self.cache.pages(wanted.request_id)
        kind = RequestKind.PROMPT if self._is_new(wanted) else RequestKind.VERIFY
        return RequestRows(kind, run.num_pending, run.num_known, pages)

    def _later_rounds(self, deep: Sequence[Wanted]) -> Iterable[Any]:
        """Give the tables of every later depth, a row for each request that goes so deep."""
        return self.cache.builder.build_rounds([self._draft_rows(w) for w in deep])

    def _draft_rows(self, wanted: Wanted) -> RequestRows:
        """All later depths: a row each."""
        count, known = wanted.drafts - 1, self._log[wanted.request_id].num_known
        pages = self.cache.pages(wanted.request_id)
        return RequestRows(RequestKind.VERIFY, count, known + count, pages)

    def _first(self, tokens: Tensor, states: Tensor, metadata: Any) -> Tensor:
        """Run rows [T] on the target's states [T, F]."""
        return self._run(tokens, self.draft.fuse(states.to(self.cache.rows.dtype)), metadata)

    def _later(self, chosen: Tensor, state: Tensor, metadata: Any) -> Tensor:
        """Run rows of drafts [B], ids of the head's vocabulary, on the head's own states."""
        tokens = chosen + self.draft.d2t[chosen]
        return self._run(tokens, self.draft.carried(state), metadata)

    def _run(self, tokens: Tensor, states: Tensor, metadata: Any) -> Tensor:
        """Run rows [T] through the layer; [T, D] for the head and the next depth."""
        layer, rows = self.draft.layer, self.cache.rows
        embedded = self.model.model.embed_tokens(tokens).to(states.dtype)
        angles = self.draft.rotary.at(metadata.positions, states.dtype)
        joined = layer.joined(embedded, states)
        attended = layer.self_attn(joined, angles, rows, 0, metadata, self.cache.backend)
        return layer.finish(states, attended)

    def _mapped(self, given: DraftProposal) -> DraftProposal:
        """Give a proposal of draft ids in the target's."""
        ids = self.draft.target_ids
        tokens = torch.where(given.tokens >= 0, ids[given.tokens.clamp(min=0)], -1)
        probs = given.probs
        if isinstance(probs, torch.Tensor):
            probs = SparseProbs(ids.expand(probs.shape).contiguous(), probs)
        return DraftProposal(given.request_ids, given.counts, tokens, probs)
