"""DeepSeek-V3's own multi-token prediction module as drafter, in the target's pages.

The module's rows are one more layer of the target's pool under the same block tables:

    step = build_step(model, num_pages=..., num_draft_layers=1)
    drafter = MTPDrafter(model, load_mtp(folder, model), step)

Row i is that of (h_i, t_{i+1}). A step first runs the rows whose true h are known since the last
one: they replace what was drafted there on the module's own states. The last of them gives the
first draft; each further draft feeds the module's output back to it, in rows from the anchor's
position on, which the target fills in the other layers afterwards.

A page of another request's prefix may be shared: its target rows are the same, the module's are
not (the last one looks at the token after the page, and h is known only where the target ran). So a
request reads the module's rows from its first computed position on, and none of anyone else's.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from drafters.sheet import DraftSheet, Wanted, drawn_proposal, split_wanted
from drafters.state_graphs import StateGraphs, StateRounds
from drafters.state_log import StateLog
from specmla import (
    FINAL,
    ArgumentError,
    DraftProposal,
    RequestKind,
    RequestRows,
    RotaryEmbedding,
    SamplingCache,
    fill_copies,
)

if TYPE_CHECKING:
    from torch import Tensor

    from specmla import (
        Bucket,
        DeepseekForCausalLM,
        DraftRequest,
        HiddenRows,
        MTPModule,
        RequestResult,
        SamplingParams,
        StepMetadata,
        VerifyStep,
    )


class MTPDrafter:
    """Drafts with one MTP module, used again for every depth.

    Args:
        model: the target, which lends embedding and head.
        module: its MTP module, on the same device and in the same dtype.
        step: the target's; its cache has a layer for the module.

    Raises:
        ArgumentError: a cache without that layer.
    """

    hidden_layers = (FINAL,)

    def __init__(self, model: DeepseekForCausalLM, module: MTPModule, step: VerifyStep) -> None:
        self._layer = model.config.num_layers
        if step.cache.num_layers <= self._layer:
            raise ArgumentError(
                f"MTPDrafter: step.cache has {step.cache.num_layers} layers, accepted are "
                f"{self._layer + 1} or more: build_step(..., num_draft_layers=1)"
            )
        self.vocab_size = model.config.vocab_size
        self.model, self.module, self.step = model, module, step
        self._rotary = RotaryEmbedding(model.config.attention)
        self._sampling = SamplingCache(step.builder.device)
        self._log = StateLog()
        network = StateRounds(self._run, self._run, model.logits)
        states = model.model.embed_tokens.weight.new_empty(0, model.config.attention.hidden_size)
        self._graphs = StateGraphs(step.builder, network, self._log, states, self._sampling)

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Draft by CUDA graphs from here on where a batch fits, see `CapturedChains`."""
        self._graphs.capture(buckets, sampling, windows=self.step.blocks.prefix_caching)

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Draft for each request whose last hidden states are known; none for others.

        Raises:
            PoolFullError: the target's pool is too small for the drafted rows.
        """
        wanted, others = split_wanted(
            [(r, r.num_drafts * self._log.is_ready(r.request_id, r.tokens)) for r in requests]
        )
        if not wanted:
            device = self.step.builder.device
            empty = torch.empty(len(others), 0, dtype=torch.int64, device=device)
            return DraftProposal(tuple(r.request_id for r in others), (0,) * len(others), empty)
        self._log.renew(w.request_id for w in wanted)
        # The rows of later depths stand where the anchor and the drafts will.
        needs = {w.request_id: w.drafts for w in wanted}
        copies = self.step.blocks.reserve(needs)
        fill_copies(self.step.cache, self.step.blocks, copies, list(needs))
        with self._log.undone_by_errors(needs):
            drawn = self._graphs.run(wanted, [self._pending_rows(w) for w in wanted])
            if drawn is not None:
                return drawn_proposal(wanted, others, drawn)
            return self._draft(wanted, others)

    def _draft(self, wanted: Sequence[Wanted], others: Sequence[DraftRequest]) -> DraftProposal:
        """Draft round by round."""
        out, anchors = self._first_round(wanted)
        sheet = DraftSheet(wanted, anchors, self.vocab_size, self._sampling)
        tokens = sheet.fill(0, self.model.logits(out))
        for depth, metadata in enumerate(self._rounds(wanted), start=1):
            count = metadata.num_rows
            out = self._run(tokens[:count], out[:count], metadata)
            tokens = sheet.fill(depth, self.model.logits(out))
        return sheet.proposal(others)

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Keep the target's states of what was committed."""
        self._log.observe(results, hidden)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request; its pages are the target's."""
        self._log.forget(request_id)

    def _first_round(self, wanted: Sequence[Wanted]) -> tuple[Tensor, Tensor]:
        """Run the rows of known states; give the last ones' output [B, D] and the anchors [B]."""
        rows = [self._pending_rows(w) for w in wanted]
        order = sorted(range(len(rows)), key=lambda i: rows[i].kind is RequestKind.PROMPT)
        tokens, last = array("q"), array("q", [0]) * len(rows)
        for i in order:
            tokens.extend(wanted[i].request.tokens[-rows[i].query_len :])
            last[i] = len(tokens) - 1
        anchors = array("q", [len(w.request.tokens) - 1 for w in wanted])
        metadata = self.step.builder.build(
            [rows[i] for i in order], along={"tokens": tokens, "last": last, "anchors": anchors}
        )
        states = self._log.take(wanted[i].request_id for i in order)
        out = self._run(metadata.along["tokens"], states, metadata)
        return out[metadata.along["last"]], metadata.along["anchors"]

    def _pending_rows(self, wanted: Wanted) -> RequestRows:
        """Rows up to the one before the anchor's: its token is the anchor."""
        run, pages = self._log[wanted.request_id], self._pages(wanted)
        if run.stored == 0:
            return RequestRows(RequestKind.PROMPT, run.num_pending, run.end, pages)
        return RequestRows(
            RequestKind.VERIFY, run.num_pending, run.end, pages, window_start=run.first
        )

    def _rounds(self, wanted: Sequence[Wanted]) -> list[StepMetadata]:
        """Build the steps of all later depths: a row a request and depth."""
        builder, deep = self.step.builder, [w for w in wanted if w.drafts > 1]
        firsts = [self._log[w.request_id].first for w in deep]
        if not any(firsts):
            return builder.build_rounds([self._draft_rows(w, w.drafts - 1) for w in deep])
        return [
            builder.build(
                [
                    self._draft_rows(w, depth)._replace(query_len=1, window_start=first)
                    for w, first in zip(deep, firsts, strict=True)
                    if w.drafts > depth
                ]
            )
            for depth in range(1, deep[0].drafts)
        ]

    def _draft_rows(self, wanted: Wanted, count: int) -> RequestRows:
        end = len(wanted.request.tokens) - 1
        return RequestRows(RequestKind.VERIFY, count, end + count, self._pages(wanted))

    def _pages(self, wanted: Wanted) -> Sequence[int]:
        return self.step.blocks.block_ids(wanted.request_id)

    def _run(self, tokens: Tensor, states: Tensor, metadata: StepMetadata) -> Tensor:
        """Run rows [T] through the module; [T, D] for the head and the next depth."""
        embedded = self.model.model.embed_tokens(tokens)
        angles = self._rotary.at(metadata.positions, embedded.dtype)
        step = self.step
        return self.module.predict(
            embedded, states, angles, step.cache, self._layer, metadata, step.builder.backend
        )
