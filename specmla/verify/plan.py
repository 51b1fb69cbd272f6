"""The device side of a planned step: what tokens run, what logits count, what drafts are judged.

Requests stand in the metadata's order (verifies first). R logit rows are those of every verify row
and of the last row of each prompt; K is the largest draft count of the step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.metadata import StepMetadata
from specmla.staging import send_arrays
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch
from specmla.verify.vocab import pad_vocab


class PlannedRequest(NamedTuple):
    """One request of a step: its pending tokens, then `num_drafts` drafts, which start at
    `proposal_offset` of the proposal's flattened tokens.

    `position` is the anchor's: the index of the last pending token in the sequence.
    """

    request_id: Hashable
    pending: Sequence[int]
    position: int
    num_drafts: int
    proposal_offset: int
    is_prompt: bool


@dataclass(frozen=True)
class StepPlan:
    """What the engine runs and what `verify` needs afterwards.

    Attributes:
        requests: B planned requests in metadata order.
        metadata: for the model's layers.
        token_ids: [T] int64, input of the model.
        logit_rows: [R] int64, rows of the hidden states whose logits `verify` takes, in order.
        row_table: [B, K + 1] int64, logit row of each verify row; a request repeats its last one.
        drafts: [B, K] int64, -1 past a request's count.
        draft_probs: [B, K, W] float32, or None for one-hot drafts.
        positions: [B] int64, each anchor's position: the key of the step's random streams.
        sampling: the parameters of the B requests.
    """

    requests: tuple[PlannedRequest, ...]
    metadata: StepMetadata
    token_ids: Tensor
    logit_rows: Tensor
    row_table: Tensor
    drafts: Tensor
    draft_probs: Tensor | None
    positions: Tensor
    sampling: SamplingBatch


def build_plan(
    requests: Sequence[PlannedRequest],
    metadata: StepMetadata,
    proposal: DraftProposal | None,
    sampling: SamplingBatch,
    *,
    vocab_size: int,
    device: torch.device,
) -> StepPlan:
    """Send the step's indices in one copy and place the drafts among the input tokens."""
    width = max((r.num_drafts for r in requests), default=0)
    sent = send_arrays(_index_arrays(requests, width), device)
    tokens, probs = sent["tokens"], None
    drafts = tokens.new_full((len(requests), width), -1)
    if proposal is not None and width:
        flat = proposal.tokens.to(device, non_blocking=True).reshape(-1)
        picked = flat.index_select(0, sent["source"]).view(len(requests), width)
        drafts = torch.where(sent["is_draft"].view_as(picked) != 0, picked, -1)
        if proposal.probs is not None:
            probs = proposal.probs.to(device, non_blocking=True)
            rows = pad_vocab(probs, vocab_size, allow_mismatch=True).flatten(0, 1)
            probs = rows.index_select(0, sent["source"]).unflatten(0, (len(requests), width))
        # An id outside the vocabulary is refused by the rule; the look-up must survive it.
        safe = flat.index_select(0, sent["draft_source"]).clamp(0, vocab_size - 1)
        tokens = tokens.index_copy(0, sent["draft_rows"], safe)
    return StepPlan(
        requests=tuple(requests),
        metadata=metadata,
        token_ids=tokens,
        logit_rows=sent["logit_rows"],
        row_table=sent["row_table"].view(len(requests), width + 1),
        drafts=drafts,
        draft_probs=probs,
        positions=sent["positions"],
        sampling=sampling,
    )


def _index_arrays(requests: Sequence[PlannedRequest], width: int) -> dict[str, array[int]]:
    """Index tables of the step; `source` points into the proposal's flattened [B', K'] tokens."""
    names = ("tokens", "positions", "logit_rows", "row_table", "source", "is_draft")
    out = {name: array("q") for name in (*names, "draft_rows", "draft_source")}
    row = logit = 0
    for r in requests:
        out["tokens"].extend(r.pending)
        out["tokens"].extend([0] * r.num_drafts)
        anchor = row + len(r.pending) - 1
        out["positions"].append(r.position)
        out["logit_rows"].extend(range(anchor, anchor + r.num_drafts + 1))
        last = logit + r.num_drafts
        out["row_table"].extend(min(logit + j, last) for j in range(width + 1))
        source = range(r.proposal_offset, r.proposal_offset + r.num_drafts)
        out["source"].extend(source)
        out["source"].extend([0] * (width - r.num_drafts))
        out["is_draft"].extend([1] * r.num_drafts + [0] * (width - r.num_drafts))
        out["draft_rows"].extend(range(anchor + 1, anchor + 1 + r.num_drafts))
        out["draft_source"].extend(source)
        row = anchor + 1 + r.num_drafts
        logit = last + 1
    return out
