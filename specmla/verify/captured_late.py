"""One bucket's overlapped step in buffers that stay: bounds from the host, made exact in the graph.

What `overlap_device` does to packed rows is done here to a rectangle of B requests of Q = 1 + K
rows; a row past a request's drafts or its limit is inert, as padding is.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.capture import CapturedMetadata
from specmla.metadata import RequestRows
from specmla.staging import send
from specmla.verify.captured_processors import fill
from specmla.verify.captured_sampling import HeldSampling
from specmla.verify.overlap_device import Anchors
from specmla.verify.overlap_plan import LateRequest
from specmla.verify.plan import StepPlan
from specmla.verify.processors.tables import ProcessorTables
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch, SamplingParams

NAMES = ("tokens", "bounds", "source", "behind", "limit", "num_drafts", "given", "skips")


class CapturedLatePlan:
    """Requests of at most Q rows whose anchors follow from a verdict that the host has not seen.

    Args:
        builder: of the cache and the backend.
        bucket: the shape.
        vocab_size: W.
        before: decisions of the step under way as a graph reads them: accepted drafts and the token
            after them, [most requests] int64 each, and all tokens, [most requests, E], -1 after.
        processors: penalties and biases of B requests, or None: never given.

    Attributes:
        plan: the one made last; of its tensors, the shapes alone mean something outside a graph.
    """

    def __init__(
        self,
        builder: MetadataBuilder,
        bucket: Bucket,
        vocab_size: int,
        before: tuple[Tensor, Tensor, Tensor],
        processors: ProcessorTables | None = None,
    ) -> None:
        num, length = bucket.num_requests, bucket.query_len
        self.bucket, self.vocab_size, self._before = bucket, vocab_size, before
        self._width = 2 * (length - 1) + 1  # drafts ahead: those of two steps, and a token between
        sizes = dict.fromkeys(NAMES, num) | {"cells": num * self._width}
        self.metadata = CapturedMetadata(builder, bucket, sizes)
        self._sampling, self._processors = HeldSampling(num), processors
        device = builder.device
        self._row_table = torch.arange(num * length, device=device).view(num, length)
        self._given = torch.full((num, self._width), -1, device=device)
        self.plan = self.for_capture(SamplingBatch.build([SamplingParams()] * num, device))

    def hold(self, sampling: SamplingBatch) -> SamplingBatch:
        """Give parameters of B requests in buffers that stay, with the flags of `sampling`."""
        held = self._sampling.hold(sampling)
        tables = self._processors if sampling.has_processors else None
        return dataclasses.replace(held, processors=tables)

    def for_capture(self, sampling: SamplingBatch) -> StepPlan:
        """Make the bounds exact, let the backend plan, and give the plan: how a graph begins.

        `sampling` is of `hold`.
        """
        sent, length = self.metadata.along, self.bucket.query_len
        at, emitted = self._anchors()
        # The last token that may be emitted gets no row, so an anchor there has none either.
        room = sent["limit"] - 2 - at.positions
        most = torch.minimum(sent["num_drafts"], room)
        rows = (1 + most) * (room >= 0)
        self.metadata.place(at.positions, rows)
        place = torch.arange(length - 1, device=rows.device)
        cells = (emitted * sent["skips"])[:, None] + place
        made = (place < most[:, None]) & (cells < sent["given"][:, None])
        drafts = self._given.gather(1, cells.clamp(max=self._width - 1))
        drafts = drafts.masked_fill(~made, -1)
        # An id outside the vocabulary is refused by the rule; the look-up must survive it.
        tokens = torch.cat([at.tokens[:, None], drafts.clamp(0, self.vocab_size - 1)], dim=1)
        last = self._row_table[:, :1] + (rows - 1).clamp(min=0)[:, None]
        self.plan = StepPlan(
            requests=(),
            metadata=self.metadata.for_capture(),
            token_ids=tokens.view(-1),
            logit_rows=torch.minimum(self._row_table, last).view(-1),
            row_table=self._row_table,
            drafts=drafts,
            draft_probs=None,
            positions=at.positions,
            sampling=sampling,
            late=self._late_tokens() if sampling.has_processors else None,
        )
        return self.plan

    def _late_tokens(self) -> Tensor:
        """Give the tokens [B, E] that the step under way emits of each, then -1."""
        source = self.metadata.along["source"]
        return self._before[2][source.clamp(min=0)].masked_fill((source < 0)[:, None], -1)

    def _anchors(self) -> tuple[Anchors, Tensor]:
        """Give the real anchors, and the tokens that the step under way emits of each [B]."""
        sent, (num_accepted, next_token, _) = self.metadata.along, self._before
        at, is_late = sent["source"].clamp(min=0), sent["source"] >= 0
        # Of a flagged row anything may come; it must only stay within what was reserved.
        accepted = torch.minimum(num_accepted[at].clamp(min=0), sent["behind"])
        decided = next_token[at].clamp(0, self.vocab_size - 1)
        tokens = torch.where(is_late, decided, sent["tokens"])
        positions = sent["bounds"] - sent["behind"] + accepted
        return Anchors(tokens, positions), (accepted + 1) * is_late

    def fill(
        self,
        late: Sequence[LateRequest],
        rows: Sequence[RequestRows],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
    ) -> None:
        """Fill the buffers; nothing waits for the device.

        Raises:
            ArgumentError: rows that were not captured; nothing was written.
        """
        missing = self.bucket.num_requests - len(late)
        end = 0 if proposal is None else proposal.tokens.numel()
        cells, given = array("q"), array("q")
        for r in late:
            drafts = range(r.first_draft, r.end_draft)[: self._width]
            given.append(len(drafts))
            cells.extend(drafts)
            cells.extend([end] * (self._width - len(drafts)))
        cells.extend([end] * (missing * self._width))
        along = _bounds(late) | {"given": given}
        for name, values in along.items():
            # Without rows: its first one would have to stand at a limit of 1.
            values.extend([-1 if name == "source" else 1 if name == "limit" else 0] * missing)
        self.metadata.for_replay(rows, along | {"cells": cells})
        tokens = self._given.new_empty(0)
        if proposal is not None:
            tokens = send(proposal.tokens, tokens.device).reshape(-1)
        flat = torch.cat([tokens, tokens.new_full((1,), -1)])
        torch.index_select(flat, 0, self.metadata.along["cells"], out=self._given.view(-1))
        self._sampling.fill(sampling)
        if self._processors is not None:
            fill(self._processors, sampling.processors)


def _bounds(late: Sequence[LateRequest]) -> dict[str, array[int]]:
    """Give what the host knows of each request, by name."""
    values: dict[str, list[int]] = {
        "tokens": [r.planned.pending[0] for r in late],
        "bounds": [r.planned.position for r in late],
        "source": [r.source for r in late],
        "behind": [r.behind for r in late],
        "limit": [r.planned.state.limit for r in late],
        "num_drafts": [r.planned.num_drafts for r in late],
        "skips": [r.skips for r in late],
    }
    return {name: array("q", found) for name, found in values.items()}
