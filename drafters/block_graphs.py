"""Proposals of block drafters as captured graphs: new context rows, one pass, and the draws.

A graph stores as many new context rows of a request as one step commits. Where there are more (a
prompt, steps without drafts), all of them are stored before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specmla import (
    Bucket,
    CapturedMetadata,
    DraftGraphs,
    DraftMask,
    QueryLenSupport,
    RequestKind,
    RequestRows,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.draft_cache import DraftCache
    from specmla import CapturedSheet, SamplingParams


class BlockRun(NamedTuple):
    """A request of a captured pass.

    Attributes:
        request_id: its name in the cache.
        stored: context rows that are in the cache; the new ones follow.
        states: [n, F], the target's states of the new ones.
        token: the anchor's.
        anchor: the anchor's position in the sequence.
        drafts: how many.
    """

    request_id: Any
    stored: int
    states: Tensor
    token: int
    anchor: int
    drafts: int


class BlockInputs:
    """Buffers of B requests with at most P new context rows each.

    Args:
        cache: the drafter's.
        num_requests, most_rows, block_size: B, P and rows of a block.
        states: a tensor of the width and dtype of states.
    """

    def __init__(
        self, cache: DraftCache, num_requests: int, most_rows: int, block_size: int, states: Tensor
    ) -> None:
        self._cache, self._most, self._size = cache, most_rows, block_size
        rows = num_requests * most_rows
        sizes = dict.fromkeys(("slots", "positions", "places"), rows)
        sizes |= dict.fromkeys(("tokens", "anchors", "counts"), num_requests)
        support = cache.backend.capabilities.query_len_support
        bucket = Bucket(num_requests, block_size, support is not QueryLenSupport.UNIFORM)
        self.metadata = CapturedMetadata(cache.builder, bucket, sizes, mask=DraftMask.FULL)
        self.states = states.new_zeros(rows, states.shape[-1])

    @property
    def anchors(self) -> Tensor:
        """Positions of the anchors [B]."""
        return self.metadata.along["anchors"]

    @property
    def counts(self) -> Tensor:
        """Drafts of each request [B]."""
        return self.metadata.along["counts"]

    def fill(self, runs: Sequence[BlockRun]) -> None:
        """Write what requests bring; pages for their rows and blocks are reserved."""
        cache, bucket, most = self._cache, self.metadata.bucket, self._most
        lens = [len(run.states) for run in runs]
        slots, positions, places = array("q"), array("q"), array("q")
        for i, (run, count) in enumerate(zip(runs, lens, strict=True)):
            end, spare = run.stored + count, [0] * (most - count)
            slots.extend(cache.slots(run.request_id, run.stored, end))
            slots.extend([-1] * len(spare))
            positions.extend([*range(run.stored, end), *spare])
            places.extend(range(i * most, i * most + count))
        missing = array("q", [0]) * (bucket.num_requests - len(runs))
        along = {
            "slots": slots + array("q", [-1]) * (most * len(missing)),
            "positions": positions + missing * most,
            "places": places + array("q", [0]) * (bucket.num_requests * most - len(places)),
            "tokens": array("q", [run.token for run in runs]) + missing,
            "anchors": array("q", [run.anchor for run in runs]) + missing,
            "counts": array("q", [run.drafts for run in runs]) + missing,
        }
        size = self._size
        rows = [
            RequestRows(
                RequestKind.VERIFY, size, run.stored + n + size, cache.pages(run.request_id)
            )
            for run, n in zip(runs, lens, strict=True)
        ]
        self.metadata.for_replay(rows, along)
        at = 0
        sent = self.metadata.along["places"]
        for run, count in zip(runs, lens, strict=True):
            if count:
                states = run.states.to(self.states.dtype)
                self.states.index_copy_(0, sent[at : at + count], states)
            at += count


class BlockGraphs(DraftGraphs[BlockInputs]):
    """Captures a block drafter's passes in buckets.

    Args:
        cache: the drafter's.
        block_size: rows of a block.
        buckets, sampling: as of `DraftGraphs`.
        states: a tensor of the width and dtype of states.
        draw: runs a pass and fills a sheet.
    """

    def __init__(
        self,
        cache: DraftCache,
        block_size: int,
        buckets: Sequence[Bucket],
        sampling: Sequence[SamplingParams],
        states: Tensor,
        draw: Callable[[BlockInputs, CapturedSheet], Any],
    ) -> None:
        self.most_rows = max((b.query_len for b in buckets), default=1)

        def inputs(num_requests: int, num_drafts: int) -> BlockInputs:
            return BlockInputs(cache, num_requests, self.most_rows, block_size, states)

        super().__init__(cache.rows.device, buckets, sampling, inputs, draw)
