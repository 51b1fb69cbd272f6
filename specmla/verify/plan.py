"""The device side of a planned step: what tokens run, what logits count, what drafts are judged.

Requests stand in the metadata's order (verifies first). R logit rows are those of every verify row
and of the last row of each prompt; K is the largest draft count of the step.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.metadata import RequestRows, StepMetadata
from specmla.staging import send
from specmla.verify.proposal import DraftProposal
from specmla.verify.requests import RequestState
from specmla.verify.sampling import SamplingBatch
from specmla.verify.sparse import DraftProbs
from specmla.verify.tree import DraftTree, TreeTables, tree_arrays, tree_tables
from specmla.verify.vocab import pick_probs, send_probs


class PlannedRequest(NamedTuple):
    """One request of a step: its pending tokens, then `num_drafts` drafts, which start at
    `proposal_offset` of the proposal's flattened tokens; of a tree they are its `nodes` from there.

    `position` is the anchor's: the index of the last pending token in the sequence.
    """

    state: RequestState
    request_id: Hashable
    pending: Sequence[int]
    position: int
    num_drafts: int
    proposal_offset: int
    is_prompt: bool
    tree: DraftTree | None = None


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
        draft_probs: [B, K, W] or sparse [B, K, C] floating, or None for one-hot drafts.
        positions: [B] int64, each anchor's position: the key of the step's random streams.
        sampling: the parameters of the B requests.
        tree: how the drafts hang together; None in a step of chains.
        late: [B, E] int64, tokens that the step under way emits, then -1; None: the host knows all.
    """

    requests: tuple[PlannedRequest, ...]
    metadata: StepMetadata
    token_ids: Tensor
    logit_rows: Tensor
    row_table: Tensor
    drafts: Tensor
    draft_probs: DraftProbs
    positions: Tensor
    sampling: SamplingBatch
    tree: TreeTables | None = None
    late: Tensor | None = None


def rows_of_requests(plan: StepPlan, logits: Tensor) -> Tensor:
    """Arrange logits [R, W] as [B, K + 1, W]; without repeated rows they stand so already."""
    if len(logits) == plan.row_table.numel():
        return logits.view(*plan.row_table.shape, -1)
    return logits[plan.row_table]


class LayOut(Protocol):
    """Puts a step whose pages are reserved into tensors."""

    def __call__(
        self,
        planned: Sequence[PlannedRequest],
        rows: Sequence[RequestRows],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
    ) -> StepPlan:
        """Give the plan; `rows` are what the planned requests bring, in their order."""
        ...


class PlanLayout(Protocol):
    """Where a step may be laid out other than in new tensors."""

    def choose(
        self,
        planned: Sequence[PlannedRequest],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
    ) -> LayOut:
        """Find a place for a step before anything is reserved for it.

        Raises:
            ArgumentError: there is none; all reasons are listed.
        """
        ...


def host_arrays(
    requests: Sequence[PlannedRequest], proposal: DraftProposal | None
) -> dict[str, array[int]]:
    """Give what `build_plan` needs on the device, to travel in the same copy as the metadata.

    `requests` stand in the metadata's order.
    """
    width = max((r.num_drafts for r in requests), default=0)
    trees = _tree_arrays(requests, width)
    if proposal is None or not _is_uniform(requests, proposal, width):
        return _ragged_arrays(requests, width) | trees
    return trees | {
        "anchors": array("q", [r.pending[0] for r in requests]),
        "row_table": array("q", range(len(requests) * (width + 1))),
        "positions": array("q", [r.position for r in requests]),
    }


def build_plan(
    requests: Sequence[PlannedRequest],
    metadata: StepMetadata,
    proposal: DraftProposal | None,
    sampling: SamplingBatch,
    vocab_size: int,
) -> StepPlan:
    """Place the drafts among the input tokens; `metadata.along` has what `host_arrays` gave."""
    if proposal is not None and "anchors" in metadata.along:
        rows = _uniform_rows(metadata.along, proposal, vocab_size)
    else:
        rows = _ragged_rows(metadata.along, len(requests), proposal, vocab_size)
    tree = None
    if any(r.tree for r in requests):
        trees, counts = [r.tree for r in requests], [r.num_drafts for r in requests]
        tree = tree_tables(metadata.along, trees, counts)
    return StepPlan(tuple(requests), metadata, *rows, sampling=sampling, tree=tree)


def _tree_arrays(requests: Sequence[PlannedRequest], width: int) -> dict[str, array[int]]:
    if not any(r.tree for r in requests):
        return {}
    return tree_arrays([r.tree for r in requests], [r.num_drafts for r in requests], width)


class _DeviceRows(NamedTuple):
    """The tensors of a `StepPlan`, in its order."""

    token_ids: Tensor
    logit_rows: Tensor
    row_table: Tensor
    drafts: Tensor
    draft_probs: DraftProbs
    positions: Tensor


def _is_uniform(requests: Sequence[PlannedRequest], proposal: DraftProposal, width: int) -> bool:
    """Tell the common step: every request verifies all of its row of the proposal, in its order."""
    if not 0 < width == proposal.tokens.shape[1] or len(requests) != len(proposal.request_ids):
        return False
    return all(
        r.num_drafts == width and r.proposal_offset == i * width and not r.is_prompt
        for i, r in enumerate(requests)
    )


def _uniform_rows(
    sent: Mapping[str, Tensor], proposal: DraftProposal, vocab_size: int
) -> _DeviceRows:
    """What `_ragged_rows` would give, without index tables: every cell is where it should be."""
    row_table, probs = sent["row_table"], proposal.probs
    drafts = send(proposal.tokens, row_table.device)
    # An id outside the vocabulary is refused by the rule; the look-up must survive it.
    tokens = torch.cat([sent["anchors"][:, None], drafts.clamp(0, vocab_size - 1)], dim=1)
    if probs is not None:
        probs = send_probs(probs, drafts.device, vocab_size)
    return _DeviceRows(
        tokens.view(-1), row_table, row_table.view_as(tokens), drafts, probs, sent["positions"]
    )


def _ragged_rows(
    sent: Mapping[str, Tensor], num_requests: int, proposal: DraftProposal | None, vocab_size: int
) -> _DeviceRows:
    """Place any mix of prompts and drafts by index tables."""
    tokens = sent["tokens"]
    probs: DraftProbs = None
    row_table = sent["row_table"].view(num_requests, -1)
    width = row_table.shape[1] - 1
    drafts = tokens.new_empty((num_requests, 0))
    if proposal is not None and width:
        given = send(proposal.tokens, tokens.device)
        # One cell more than the proposal has: what a request lacks is read from there.
        flat = torch.cat([given.reshape(-1), given.new_full((1,), -1)])
        source = sent["source"] + (sent["source"] < 0) * flat.shape[0]
        drafts = flat.index_select(0, source).view(num_requests, width)
        if proposal.probs is not None:
            # Of padding any row will do.
            cells = source.clamp(max=flat.shape[0] - 2).view(num_requests, width)
            probs = pick_probs(send_probs(proposal.probs, tokens.device, vocab_size), cells)
        # An id outside the vocabulary is refused by the rule; the look-up must survive it.
        safe = flat.index_select(0, sent["draft_source"]).clamp(0, vocab_size - 1)
        tokens = tokens.index_copy(0, sent["draft_rows"], safe)
    return _DeviceRows(tokens, sent["logit_rows"], row_table, drafts, probs, sent["positions"])


def _ragged_arrays(requests: Sequence[PlannedRequest], width: int) -> dict[str, array[int]]:
    """Index tables of the step; `source` points into the proposal's flattened [B', K'] tokens and
    is -1 where a request has no draft."""
    tokens, positions, logit_rows, row_table = (array("q") for _ in range(4))
    source, draft_rows, draft_source = (array("q") for _ in range(3))
    row = logit = 0
    for r in requests:
        count = r.num_drafts
        tokens.extend(r.pending)
        tokens.extend([0] * count)
        positions.append(r.position)
        anchor = row + len(r.pending) - 1
        row, last = anchor + count + 1, logit + count
        logit_rows.extend(range(anchor, row))
        row_table.extend(range(logit, last + 1))
        row_table.extend([last] * (width - count))
        logit = last + 1
        drafts: Sequence[int] = range(r.proposal_offset, r.proposal_offset + count)
        if r.tree is not None:
            drafts = [r.proposal_offset + node for node in r.tree.nodes]
        source.extend(drafts)
        source.extend([-1] * (width - count))
        draft_source.extend(drafts)
        draft_rows.extend(range(anchor + 1, row))
    return {
        "tokens": tokens,
        "positions": positions,
        "logit_rows": logit_rows,
        "row_table": row_table,
        "source": source,
        "draft_rows": draft_rows,
        "draft_source": draft_source,
    }
