"""Drafts whole blocks in one pass: what DFlash and DSpark share.

Every committed token but the anchor has a context row, made from the target's hidden states, in the
drafter's own latent cache. A pass appends the context rows that the last step brought, then
runs a block [anchor, mask ...] behind them, in which every row sees all context and the whole
block: a non-causal decode of several tokens. Its rows go to scratch pages that are given back at
once, so nothing of a draft is ever kept.

States are known of rows that the target computed, not of prefixes found in its cache: there the
context begins with the first computed row, and nobody attends to what was never written.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from drafters.block_captured import CapturableBlocks
from drafters.block_config import check_target
from drafters.block_model import pair_problems
from drafters.draft_cache import DraftCache
from drafters.sheet import DraftSheet, Wanted, drawn_proposal, split_wanted
from drafters.state_log import StateLog
from specmla import (
    ArgumentError,
    CapturedSheet,
    DraftMask,
    DraftProposal,
    RequestKind,
    RequestRows,
    SamplingCache,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block_model import BlockDraftModel
    from specmla import (
        DeepseekForCausalLM,
        DraftRequest,
        HiddenRows,
        RequestResult,
        StepMetadata,
    )


@dataclass(frozen=True)
class BlockOutput:
    """One pass over a batch.

    Attributes:
        wanted: B requests with drafts, by falling count.
        others: requests that get none.
        hidden: [B, K, D], states for the head of the rows that predict draft 1 .. K.
        logits: [B, K, W] of the same rows, before any sequential head: each position's marginal.
        anchor_tokens: [B] int64. anchors: [B] int64, their positions.
    """

    wanted: list[Wanted]
    others: list[DraftRequest]
    hidden: Tensor
    logits: Tensor
    anchor_tokens: Tensor
    anchors: Tensor


class BlockDrafter(CapturableBlocks):
    """Runs blocks; how drafts are chosen from their logits is the business of subclasses.

    Args:
        model: the target, which lends embedding and head.
        draft: the block network, on the same device.
        num_pages, page_size: of the drafter's own pool, in tokens of context.
        backend: attention backend by name, the best one that serves non-causal rows if None.

    Raises:
        ArgumentError: no target, or no block network of MLA layers.
        CheckpointError: a network made for another target.
        UnsupportedError: no backend can serve it.
    """

    def __init__(
        self,
        model: DeepseekForCausalLM,
        draft: BlockDraftModel,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
    ) -> None:
        if found := pair_problems(model, draft):
            raise ArgumentError(f"{type(self).__name__}: " + "; ".join(found))
        config = draft.config
        check_target(config, model.config, type(self).__name__)
        weight = draft.fc.weight
        self.model, self.draft = model, draft
        self.vocab_size = model.config.vocab_size
        self.hidden_layers = config.target_layer_ids
        self.cache = DraftCache(
            config.mla,
            config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=model.config.max_position_embeddings + config.block_size,
            mask=DraftMask.FULL,
            dtype=weight.dtype,
            device=weight.device,
            backend=backend,
        )
        self._sampling = SamplingCache(weight.device)
        self._log = StateLog()

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Draft a chain for each request whose context is known, at most a block; none for others.

        Raises:
            PoolFullError: the drafter's pool is too small; nothing was reserved.
        """
        wanted, others = self._split(requests)
        drawn = self._replay(wanted) if wanted and self._graphs is not None else None
        if drawn is not None:
            return drawn_proposal(wanted, others, drawn)
        output = self.run_blocks(requests)
        if output is None:
            names, device = tuple(r.request_id for r in requests), self.cache.rows.device
            empty = torch.empty(len(names), 0, dtype=torch.int64, device=device)
            return DraftProposal(names, (0,) * len(names), empty)
        sheet = DraftSheet(output.wanted, output.anchors, self.vocab_size, self._sampling)
        self.fill(sheet, output)
        return sheet.proposal(output.others)

    def fill(self, sheet: DraftSheet | CapturedSheet, output: BlockOutput) -> None:
        """Choose the drafts; each position by itself unless a subclass knows better."""
        for column in range(sheet.width):
            sheet.fill(column, output.logits[: sheet.live(column), column])

    @torch.no_grad()
    def run_blocks(self, requests: Sequence[DraftRequest]) -> BlockOutput | None:
        """Run one block for each request that can be drafted for; None if there is none.

        The logits are the marginals of a tree; `propose` draws a chain from them.
        """
        wanted, others = self._split(requests)
        if not wanted:
            return None
        with self._undone_by_errors(wanted):
            self._reserve(wanted)
            metadata = self._build(wanted)
            self._store_context(wanted, metadata)
            output = self._output(wanted, others, metadata, wanted[0].drafts)
        self._keep(wanted)
        return output

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Keep the target's states of what was committed."""
        for request_id in self._log.observe(results, hidden):
            self.cache.drop(request_id)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request and give its pages back."""
        self._log.forget(request_id)
        self.cache.drop(request_id)

    def _split(self, requests: Sequence[DraftRequest]) -> tuple[list[Wanted], list[DraftRequest]]:
        """Tell requests whose context is known, and how many drafts each gets, from others."""
        most, log = self.draft.config.num_drafts, self._log
        return split_wanted(
            [(r, min(r.num_drafts, most) * log.is_ready(r.request_id, r.tokens)) for r in requests]
        )

    def _reserve(self, wanted: Sequence[Wanted]) -> None:
        """Make room for new context rows and blocks."""
        self._log.renew(w.request_id for w in wanted)
        rows = self.draft.config.block_size
        self.cache.reserve(
            {w.request_id: self._log[w.request_id].num_pending + rows for w in wanted}
        )

    def _keep(self, wanted: Sequence[Wanted]) -> None:
        """Keep context rows, give those of blocks back."""
        for w in wanted:
            self.cache.keep(w.request_id, self._log[w.request_id].num_known)

    def _output(
        self, wanted: list[Wanted], others: list[DraftRequest], metadata: StepMetadata, width: int
    ) -> BlockOutput:
        """Run the blocks of a step; K is `width`."""
        hidden = self._run(metadata)[:, :width]
        logits = self.draft.logits(hidden, self.model)
        # The mask token is none that a text could hold.
        logits[..., self.draft.config.mask_token_id] = -torch.inf
        sent = metadata.along
        return BlockOutput(wanted, others, hidden, logits, sent["tokens"], sent["anchors"])

    def _build(self, wanted: Sequence[Wanted]) -> StepMetadata:
        """Tables of the blocks, and where the new context rows go, in one copy."""
        slots, positions = array("q"), array("q")
        rows, size = [], self.draft.config.block_size
        for w in wanted:
            run = self._log[w.request_id]
            start, end = run.stored - run.first, run.num_known
            slots.extend(self.cache.slots(w.request_id, start, end))
            positions.extend(range(start, end))
            pages = self.cache.pages(w.request_id)
            rows.append(RequestRows(RequestKind.VERIFY, size, end + size, pages))
        along = {
            "slots": slots,
            "positions": positions,
            "tokens": array("q", [w.request.tokens[-1] for w in wanted]),
            "anchors": array("q", [len(w.request.tokens) - 1 for w in wanted]),
        }
        return self.cache.builder.build(rows, DraftMask.FULL, along)

    def _store_context(self, wanted: Sequence[Wanted], metadata: StepMetadata) -> None:
        self._store_rows(self._log.take(w.request_id for w in wanted), metadata.along)

    def _store_rows(self, states: Tensor, sent: Mapping[str, Tensor]) -> None:
        """Store context rows of states [R, F] at the slots sent, and their positions."""
        draft = self.draft
        context = draft.context(states.to(self.cache.rows.dtype))
        angles = draft.rotary.at(sent["positions"], context.dtype)
        for layer_id in range(draft.config.num_layers):
            latent, rope = draft.context_latent(layer_id, context, angles)
            self.cache.rows.store(layer_id, latent, rope, sent["slots"])

    def _run(self, metadata: StepMetadata) -> Tensor:
        """Run [anchor, mask ...] of every request; states of the rows that predict, [B, ., D]."""
        config, anchors = self.draft.config, metadata.along["tokens"]
        tokens = anchors[:, None].repeat(1, config.block_size)
        tokens[:, 1:] = config.mask_token_id
        embedded = self.model.model.embed_tokens(tokens.view(-1)).to(self.cache.rows.dtype)
        hidden: Tensor = self.draft(embedded, metadata, self.cache.rows, self.cache.backend)
        hidden = hidden.view(*tokens.shape, -1).to(self.model.model.embed_tokens.weight.dtype)
        return hidden if config.sample_from_anchor else hidden[:, 1:]
