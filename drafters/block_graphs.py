"""Proposals of block drafters as captured graphs: new context rows, one pass, and the draws.

A graph stores as many new context rows of a request as one step commits. Where there are more (a
prompt, steps without drafts), all of them are stored before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
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
        num_new: of the new ones.
        token: the anchor's.
        anchor: the anchor's position in the sequence.
        drafts: how many.
    """

    request_id: Any
    stored: int
    num_new: int
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

    def fill(self, runs: Sequence[BlockRun], states: Tensor | None) -> None:
        """Write what requests bring; pages for their rows and blocks are reserved.

        Args:
            runs: the requests.
            states: [R, F], the target's states of their new rows, in order; None without any.
        """
        cache, bucket, most, size = self._cache, self.metadata.bucket, self._most, self._size
        slots, positions, places = list[Iterable[int]](), list[Iterable[int]](), array("q")
        rows = []
        for i, run in enumerate(runs):
            end, spare = run.stored + run.num_new, most - run.num_new
            pages = cache.pages(run.request_id)
            slots += [*cache.slot_runs(pages, run.stored, end), repeat(-1, spare)]
            positions += [range(run.stored, end), repeat(0, spare)]
            places.extend(range(i * most, i * most + run.num_new))
            rows.append(RequestRows(RequestKind.VERIFY, size, end + size, pages))
        missing = array("q", [0]) * (bucket.num_requests - len(runs))
        along = {
            "slots": array("q", chain(*slots, repeat(-1, most * len(missing)))),
            "positions": array("q", chain(*positions, missing * most)),
            "places": places + array("q", [0]) * (bucket.num_requests * most - len(places)),
            "tokens": array("q", [run.token for run in runs]) + missing,
            "anchors": array("q", [run.anchor for run in runs]) + missing,
            "counts": array("q", [run.drafts for run in runs]) + missing,
        }
        self.metadata.for_replay(rows, along)
        if states is not None:
            at = self.metadata.along["places"][: len(states)]
            self.states.index_copy_(0, at, states.to(self.states.dtype))


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
