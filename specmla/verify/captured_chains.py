"""A drafter's chains as CUDA graphs: new rows, all rounds and all draws in one replay.

Between two rounds nothing comes from the host: a draft goes into the next round where it was
drawn, and lengths, positions and slots are moved on by the device (`CapturedMetadata.advance`). On
a CPU there are no graphs: a replay calls the same function over the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.errors import require
from specmla.metadata import StepMetadata
from specmla.verify.captured_chain_rows import HeldChains, PendingRows
from specmla.verify.captured_graph import record
from specmla.verify.captured_mode import Flags, flags_of
from specmla.verify.captured_sheet import CapturedSheet, DrawnChains, drafting
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


class ChainGraph(NamedTuple):
    """One bucket's graph for one form of sampling."""

    held: HeldChains
    replay: Callable[[], DrawnChains]


class CapturedChains:
    """Captures a drafter's network in buckets and replays it.

    Args:
        builder: of the drafter's cache and backend.
        network: what runs. What it reads beside its arguments must stay where it is.
        buckets: of 1 + K rows for K drafts; those of one row hold no draft and are passed over.
        sampling: parameters, of which every kind is captured, and that of all in one batch.
        most_rows: rows that a request may bring, P.
        states: a tensor of the width and dtype of the rows' states, if they have any.
        windows: requests may have a window start, which holds for all their rounds.

    Raises:
        ArgumentError: no bucket of two rows or more, no sampling, `most_rows` below 1, a UNIFORM
            backend.
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
        ordered = sorted({(b.num_requests, b.query_len) for b in buckets if b.query_len > 1})
        found = [] if ordered else ["buckets has none of two rows or more"]
        found += [] if sampling else ["sampling is empty, accepted is one or more"]
        found += [f"most_rows is {most_rows}, accepted is 1 or more"] if most_rows < 1 else []
        require(found, "CapturedChains")
        device = builder.device
        self.network, self.most_rows = network, most_rows
        kinds = _kinds(sampling, device)
        self._held = [HeldChains(builder, b, q - 1, most_rows, states, windows) for b, q in ordered]
        self._held.sort(key=lambda held: held.num_requests * held.num_drafts)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # The largest first: the others fit into the memory that it took.
        self._graphs = {
            (held.num_requests, held.num_drafts, flags): record(
                self._call(held, batch), device, pool
            )
            for held in reversed(self._held)
            for flags, batch in kinds.items()
        }

    def covers(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> bool:
        """Tell whether all of this was captured."""
        kinds = _kinds(sampling, torch.device("cpu"))
        sizes = {(b.num_requests, b.query_len - 1) for b in buckets if b.query_len > 1}
        return all((*size, kind) in self._graphs for size in sizes for kind in kinds)

    def find(self, num_drafts: Sequence[int], sampling: SamplingBatch) -> ChainGraph | None:
        """Give the smallest graph that holds requests of so many drafts each, None without one."""
        flags = flags_of(drafting(sampling))
        for held in self._held:
            key = (held.num_requests, held.num_drafts, flags)
            if held.holds(num_drafts) and key in self._graphs:
                return ChainGraph(held, self._graphs[key])
        return None

    @torch.no_grad()
    def run(
        self,
        graph: ChainGraph,
        pending: Sequence[PendingRows],
        sampling: SamplingBatch,
        states: Tensor | None = None,
    ) -> DrawnChains:
        """Draft for requests of which `find` gave the graph; nothing waits for the device.

        Args:
            graph: of `find`.
            pending: requests in the order of the result.
            sampling: theirs, in this order.
            states: [R, F] of their rows, request after request.

        Raises:
            ArgumentError: more rows than captured, or pages that can't be served; nothing ran.
        """
        graph.held.fill(pending, drafting(sampling), states)
        return graph.replay()

    def _call(self, held: HeldChains, sampling: SamplingBatch) -> Callable[[], DrawnChains]:
        batch, network = held.sampling.hold(sampling), self.network

        @torch.no_grad()
        def call() -> DrawnChains:
            metadata, sent = held.first.for_capture(), held.first.along
            out = network.first(sent["tokens"], held.states, metadata)
            out = out.index_select(0, sent["last"])
            sheet = CapturedSheet(batch, sent["anchors"], held.num_drafts)
            held.rounds.follow(held.first)
            chosen = sheet.draw(0, network.logits(out))
            for column in range(1, held.num_drafts):
                held.rounds.advance()
                out = network.later(chosen, out, held.rounds.for_capture())
                chosen = sheet.draw(column, network.logits(out))
            return sheet.cut(sent["counts"])

        return call


def _kinds(sampling: Sequence[SamplingParams], device: torch.device) -> dict[Flags, SamplingBatch]:
    """Give a batch of each form that single parameters have, and all of them together."""
    groups = [*([params] for params in sampling), list(sampling)]
    batches = [drafting(SamplingBatch.build(group, device)) for group in groups]
    return {flags_of(batch): batch for batch in batches}
