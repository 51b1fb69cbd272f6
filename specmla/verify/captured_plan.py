"""One bucket's `StepPlan` in buffers that stay, filled before every replay."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.capture import CapturedMetadata
from specmla.mask import DraftMask
from specmla.metadata import RequestRows, StepMetadata
from specmla.staging import send
from specmla.verify.captured_processors import fill
from specmla.verify.captured_sampling import HeldSampling
from specmla.verify.captured_trees import padded_tables, padded_trees, tree_sizes
from specmla.verify.plan import PlannedRequest, StepPlan
from specmla.verify.processors.tables import ProcessorTables
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch
from specmla.verify.tree import TreeTables
from specmla.verify.vocab import dense_probs, send_probs


class CapturedPlan:
    """Tokens, drafts and parameters of at most B requests of at most Q rows; the rest is inert.

    A request that is not there has no draft and the parameters of whoever was there last. Rows that
    it does not bring repeat its last one where logits are taken, so that nothing of a padded row is
    ever judged.

    Args:
        builder: of the cache and the backend.
        bucket: the shape, K = Q - 1.
        vocab_size: W.
        draft_probs: [B, K, W] float32 for the drafts' distributions, or None: never given.
        processors: penalties, biases and masks of B requests, or None: never given.
    """

    def __init__(
        self,
        builder: MetadataBuilder,
        bucket: Bucket,
        vocab_size: int,
        draft_probs: Tensor | None = None,
        processors: ProcessorTables | None = None,
    ) -> None:
        num, length = bucket.num_requests, bucket.query_len
        self.bucket, self.vocab_size, self.draft_probs = bucket, vocab_size, draft_probs
        sizes = {
            "anchors": num,
            "anchor_positions": num,
            "source": num * (length - 1),
            "logit_rows": num * length,
        }
        mask = DraftMask.TREE if bucket.trees else DraftMask.CAUSAL
        self.metadata = CapturedMetadata(builder, bucket, sizes | tree_sizes(bucket), mask=mask)
        self._tree = self._tree_tables()
        device = builder.device
        self._row_table = torch.arange(num * length, device=device).view(num, length)
        self._token_ids = torch.zeros(num, length, dtype=torch.int64, device=device)
        self._drafts = torch.full((num, length - 1), -1, device=device)
        self._sampling, self._processors = HeldSampling(num), processors

    def hold(self, sampling: SamplingBatch) -> SamplingBatch:
        """Give parameters of B requests in buffers that stay, with the flags of `sampling`."""
        held = self._sampling.hold(sampling)
        tables = self._processors if sampling.has_processors else None
        return dataclasses.replace(held, processors=tables)

    def for_capture(self, sampling: SamplingBatch, *, has_probs: bool) -> StepPlan:
        """Give the plan over the buffers: what a graph begins with.

        Args:
            sampling: from `hold`.
            has_probs: whether drafts come with their distributions.
        """
        metadata = self.metadata.for_capture()
        # An id outside the vocabulary is refused by the rule; the look-up must survive it.
        safe = self._drafts.clamp(0, self.vocab_size - 1)
        torch.cat([metadata.along["anchors"][:, None], safe], dim=1, out=self._token_ids)
        self._tree = self._tree_tables()
        return self._plan((), metadata, sampling, has_probs=has_probs)

    def for_replay(
        self,
        planned: Sequence[PlannedRequest],
        rows: Sequence[RequestRows],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
    ) -> StepPlan:
        """Fill the buffers; nothing waits for the device.

        Returns:
            The plan over them. Its token ids hold after the replay, which writes them; its tensors
            have padding after the rows of its requests.

        Raises:
            ArgumentError: rows that were not captured; nothing was written.
        """
        missing = 0 if proposal is None else proposal.tokens.numel()
        self.metadata.for_replay(rows, self._arrays(planned, missing))
        if self._drafts.shape[1]:
            self._fill_drafts(proposal)
        self._sampling.fill(sampling)
        if self._processors is not None:
            fill(self._processors, sampling.processors)
        metadata = self.metadata.live(len(planned))
        has_probs = proposal is not None and proposal.probs is not None
        return self._plan(planned, metadata, sampling, has_probs=has_probs)

    def _plan(
        self,
        requests: Sequence[PlannedRequest],
        metadata: StepMetadata,
        sampling: SamplingBatch,
        *,
        has_probs: bool,
    ) -> StepPlan:
        return StepPlan(
            requests=tuple(requests),
            metadata=metadata,
            token_ids=self._token_ids.view(-1),
            logit_rows=metadata.along["logit_rows"],
            row_table=self._row_table,
            drafts=self._drafts,
            draft_probs=self.draft_probs if has_probs else None,
            positions=metadata.along["anchor_positions"],
            sampling=sampling,
            tree=self._tree,
        )

    def _tree_tables(self) -> TreeTables | None:
        return padded_tables(self.bucket, self.metadata.along) if self.bucket.trees else None

    def _arrays(self, planned: Sequence[PlannedRequest], missing: int) -> dict[str, array[int]]:
        """Give the index tables; `source` points at `missing` where there is no draft."""
        num, length = self.bucket.num_requests, self.bucket.query_len
        source, logit_rows = array("q"), array("q")
        for i, r in enumerate(planned):
            count, offset, row = r.num_drafts, r.proposal_offset, i * length
            nodes = range(count) if r.tree is None else r.tree.nodes
            source.extend([offset + node for node in nodes])
            source.extend([missing] * (length - 1 - count))
            logit_rows.extend(range(row, row + count + 1))
            logit_rows.extend([row + count] * (length - 1 - count))
        blank = [0] * (num - len(planned))
        source.extend([missing] * (len(blank) * (length - 1)))
        logit_rows.extend(range(len(planned) * length, num * length))
        return {
            "anchors": array("q", [r.pending[0] for r in planned] + blank),
            "anchor_positions": array("q", [r.position for r in planned] + blank),
            "source": source,
            "logit_rows": logit_rows,
        } | padded_trees(self.bucket, planned)

    def _fill_drafts(self, proposal: DraftProposal | None) -> None:
        source = self.metadata.along["source"]
        given = source.new_empty(0)
        if proposal is not None:
            given = send(proposal.tokens, source.device).reshape(-1)
        # One cell more than the proposal has: what a request lacks is read from there.
        flat = torch.cat([given, given.new_full((1,), -1)])
        torch.index_select(flat, 0, source, out=self._drafts.view(-1))
        if proposal is not None and proposal.probs is not None and self.draft_probs is not None:
            sent = send_probs(proposal.probs, source.device, self.vocab_size)
            probs = dense_probs(sent, self.vocab_size).flatten(0, 1)
            if len(probs):  # of padding any row will do
                out = self.draft_probs.view(-1, self.vocab_size)
                torch.index_select(probs, 0, source.clamp(max=len(probs) - 1), out=out)
