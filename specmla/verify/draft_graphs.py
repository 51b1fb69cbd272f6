"""Whole proposals as CUDA graphs, by bucket and kind of sampling; a drafter says what they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.errors import require
from specmla.verify.captured_buckets import capture_problems
from specmla.verify.captured_graph import record
from specmla.verify.captured_mode import Flags, flags_of
from specmla.verify.captured_sampling import HeldSampling
from specmla.verify.captured_sheet import CapturedSheet, DrawnDrafts
from specmla.verify.sampling import SamplingBatch, SamplingParams


class DraftInputs(Protocol):
    """What a graph reads, in buffers that stay.

    Attributes:
        anchors: [B] int64, positions of the anchors. counts: [B] int64, drafts of each request.
    """

    @property
    def anchors(self) -> Tensor:
        """Give the anchors' positions."""
        ...

    @property
    def counts(self) -> Tensor:
        """Give the numbers of drafts."""
        ...


I = TypeVar("I", bound=DraftInputs)  # noqa: E741 - inputs


class DraftGraph(NamedTuple, Generic[I]):
    """One bucket's graph for one kind of sampling; fill `inputs` before a replay.

    Attributes:
        num_requests, num_drafts: B and K of the bucket.
        inputs: what the drafter made for it.
    """

    num_requests: int
    num_drafts: int
    inputs: I
    sampling: HeldSampling
    replay: Callable[[], DrawnDrafts]


class DraftGraphs(Generic[I]):
    """Captures what a drafter runs in buckets.

    Args:
        device: where it runs.
        buckets: of 1 + K rows for K drafts; those of one row or of trees are passed over.
        sampling: parameters, of which every kind is captured, and that of all in one batch.
        inputs: makes the buffers of B requests and K drafts.
        draw: fills all columns of a sheet from them, and reads nothing back from the device; what
            it gives comes along with the drafts.

    Raises:
        ArgumentError: no bucket of two rows or more, no sampling.
        RuntimeError: what can't be captured, since it waits for the device.
    """

    def __init__(
        self,
        device: torch.device,
        buckets: Sequence[Bucket],
        sampling: Sequence[SamplingParams],
        inputs: Callable[[int, int], I],
        draw: Callable[[I, CapturedSheet], Any],
    ) -> None:
        require(capture_problems(buckets, sampling), type(self).__name__)
        sizes = _sizes(buckets)
        found = [] if sizes else ["buckets has none of two rows or more, for chains"]
        found += [] if sampling else ["sampling is empty, accepted is one or more"]
        require(found, type(self).__name__)
        kinds = _kinds(sampling, device)
        made = {size: (inputs(*size), HeldSampling(size[0])) for size in sizes}
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs: dict[tuple[tuple[int, int], Flags], DraftGraph[I]] = {}
        for size in reversed(sizes):  # the others fit into the memory that the largest took
            given, held = made[size]
            for flags, batch in kinds.items():
                replay = record(_call(given, held.hold(batch), size[1], draw), device, pool)
                self._graphs[size, flags] = DraftGraph(*size, given, held, replay)
        self._sizes = sizes

    def covers(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> bool:
        """Tell whether all of this was captured.

        Raises:
            ArgumentError: what are no buckets, or no parameters.
        """
        require(capture_problems(buckets, sampling), type(self).__name__)
        kinds = _kinds(sampling, torch.device("cpu"))
        return all((size, kind) in self._graphs for size in _sizes(buckets) for kind in kinds)

    def find(self, num_drafts: Sequence[int], sampling: SamplingBatch) -> DraftGraph[I] | None:
        """Give the smallest graph that holds requests of so many drafts each, None without one."""
        flags = flags_of(_drafting(sampling))
        for size in self._sizes:
            fits = len(num_drafts) <= size[0] and max(num_drafts) <= size[1]
            if fits and (size, flags) in self._graphs:
                return self._graphs[size, flags]
        return None

    @torch.no_grad()
    def run(self, graph: DraftGraph[I], sampling: SamplingBatch) -> DrawnDrafts:
        """Draw for the requests whose inputs were filled in; nothing waits for the device.

        `sampling` has their parameters, in the order of the rows.
        """
        graph.sampling.fill(_drafting(sampling))
        return graph.replay()


def _call(
    given: I,
    batch: SamplingBatch,
    num_drafts: int,
    draw: Callable[[I, CapturedSheet], Any],
) -> Callable[[], DrawnDrafts]:
    @torch.no_grad()
    def call() -> DrawnDrafts:
        sheet = CapturedSheet(batch, given.anchors, num_drafts)
        besides = draw(given, sheet)
        return sheet.cut(given.counts, besides)

    return call


def _sizes(buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
    """Give requests and drafts of the buckets, those of fewer cells first."""
    chains = [b for b in buckets if b.query_len > 1 and not b.trees]
    sizes = {(b.num_requests, b.query_len - 1) for b in chains}
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))


def _kinds(sampling: Sequence[SamplingParams], device: torch.device) -> dict[Flags, SamplingBatch]:
    """Give a batch of each kind that single parameters have, and all of them together."""
    groups = [*([params] for params in sampling), list(sampling)]
    batches = [_drafting(SamplingBatch.build(group, device)) for group in groups]
    return {flags_of(batch): batch for batch in batches}


def _drafting(sampling: SamplingBatch) -> SamplingBatch:
    """Leave out what drafts don't depend on."""
    if sampling.raw_logprobs is None:
        return sampling
    return dataclasses.replace(sampling, raw_logprobs=None)
