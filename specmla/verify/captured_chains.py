"""A drafter's chains as CUDA graphs: new rows, all rounds and all draws in one replay.

Between two rounds nothing comes from the host: a draft goes into the next round where it was
drawn, and lengths, positions and slots are moved on by the device (`CapturedMetadata.advance`). On
a CPU there are no graphs: a replay calls the same function over the same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.metadata import StepMetadata
from specmla.verify.captured_chain_rows import HeldChains, PendingRows
from specmla.verify.captured_sheet import CapturedSheet, DrawnDrafts
from specmla.verify.draft_graphs import DraftGraph, DraftGraphs
from specmla.verify.sampling import SamplingBatch, SamplingParams


class ChainNetwork(Protocol):
    """What runs in the rounds of a drafter; it may read nothing back from the device."""

    def first(self, tokens: Tensor, states: Tensor | None, metadata: StepMetadata) -> Tensor:
        """Run the rows [T] that were not seen yet, with their states [T, F] if there are any.

        Rows that nobody brings have slot -1 and see no key. Gives [T, D].
        """
        ...

    def later(self, tokens: Tensor, out: Tensor, metadata: StepMetadata) -> Tensor:
        """Run the drafts [B] of the last round, which gave `out` [B, D]; a row each. [B, D]."""
        ...

    def logits(self, out: Tensor) -> Tensor:
        """Map [B, D] to the logits [B, W] of the next draft."""
        ...


class CapturedChains(DraftGraphs[HeldChains]):
    """Captures a drafter's network in buckets and replays it.

    Args:
        builder: of the drafter's cache and backend.
        network: what runs. What it reads beside its arguments must stay where it is.
        buckets, sampling: as of `DraftGraphs`.
        most_rows: rows that a request may bring, P.
        states: a tensor of the width and dtype of the rows' states, if they have any.
        windows: requests may have a window start, which holds for all their rounds.

    Raises:
        ArgumentError: as `DraftGraphs`, `most_rows` below 1, a UNIFORM backend.
        RuntimeError: a network that can't be captured, since it waits for the device.
    """

    def __init__(
        self,
        builder: MetadataBuilder,
        network: ChainNetwork,
        buckets: Sequence[Bucket],
        sampling: Sequence[SamplingParams],
        most_rows: int,
        states: Tensor | None = None,
        windows: bool = False,
    ) -> None:
        self.network, self.most_rows = network, most_rows

        def inputs(num_requests: int, num_drafts: int) -> HeldChains:
            return HeldChains(builder, Bucket(num_requests, most_rows), states, windows)

        super().__init__(builder.device, buckets, sampling, inputs, self._draw)

    def draft(
        self,
        graph: DraftGraph[HeldChains],
        pending: Sequence[PendingRows],
        sampling: SamplingBatch,
        states: Tensor | None = None,
    ) -> DrawnDrafts:
        """Draft for requests of which `find` gave the graph; nothing waits for the device.

        Args:
            graph: of `find`.
            pending: requests in the order of the result.
            sampling: theirs, in this order.
            states: [R, F] of their rows, request after request.

        Raises:
            ArgumentError: more rows than captured, or pages that can't be served; nothing ran.
        """
        graph.inputs.fill(pending, states)
        return self.run(graph, sampling)

    def _draw(self, held: HeldChains, sheet: CapturedSheet) -> None:
        metadata, sent, network = held.first.for_capture(), held.first.along, self.network
        out = network.first(sent["tokens"], held.states, metadata)
        out = out.index_select(0, sent["last"])
        held.rounds.follow(held.first)
        chosen = sheet.fill(0, network.logits(out))
        for column in range(1, sheet.width):
            held.rounds.advance()
            out = network.later(chosen, out, held.rounds.for_capture())
            chosen = sheet.fill(column, network.logits(out))
