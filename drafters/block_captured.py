"""The captured side of block drafters: what their graphs hold, and what happens around a replay."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drafters.block_graphs import BlockGraphs, BlockInputs, BlockRun
from drafters.draft_cache import given_back_by_errors
from specmla import Bucket, send_arrays

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block import BlockOutput
    from drafters.block_model import BlockDraftModel
    from drafters.draft_cache import DraftCache
    from drafters.sheet import DraftSheet, Wanted
    from drafters.state_log import StateLog
    from specmla import (
        CapturedSheet,
        DeepseekForCausalLM,
        DraftRequest,
        DrawnDrafts,
        SamplingCache,
        SamplingParams,
        StepMetadata,
    )


class CapturableBlocks:
    """Drafts blocks by graphs; `BlockDrafter` has the parts that both ways share."""

    model: DeepseekForCausalLM
    draft: BlockDraftModel
    hidden_layers: Sequence[int]
    cache: DraftCache
    _sampling: SamplingCache
    _log: StateLog
    _graphs: BlockGraphs | None = None

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Draft by CUDA graphs from here on where a batch fits, see `DraftGraphs`."""
        most = 1 + self.draft.config.num_drafts
        fitting = [Bucket(b.num_requests, min(b.query_len, most)) for b in buckets]
        if self._graphs is None or not self._graphs.covers(fitting, sampling):
            width = len(self.hidden_layers) * self.model.config.attention.hidden_size
            states = self.draft.fc.weight.new_empty(0, width)
            size = self.draft.config.block_size
            self._graphs = BlockGraphs(self.cache, size, fitting, sampling, states, self._draw)

    def _replay(self, wanted: Sequence[Wanted]) -> DrawnDrafts | None:
        """Draft by a graph; None, before anything ran, if none was captured that holds these."""
        assert self._graphs is not None
        batch = self._sampling.get(w.request.sampling for w in wanted)
        graph = self._graphs.find([w.drafts for w in wanted], batch)
        if graph is None:
            return None
        with self._undone_by_errors(wanted):
            self._reserve(wanted)
            graph.inputs.fill(*self._take(wanted, self._graphs.most_rows))
            drawn = self._graphs.run(graph, batch)
        self._keep(wanted)
        return drawn

    def _take(self, wanted: Sequence[Wanted], most: int) -> tuple[list[BlockRun], Tensor | None]:
        """Take the new context rows of requests; those of one with more than `most` are stored at
        once."""
        log, runs, short = self._log, list[BlockRun](), list[Hashable]()
        for w in wanted:
            known, name, tokens = log[w.request_id], w.request_id, w.request.tokens
            start, count = known.stored - known.first, known.num_pending
            if count > most:
                self._store_behind(name, start, log.take([name]))
                start, count = start + count, 0
            elif count:
                short.append(name)
            runs.append(BlockRun(name, start, count, tokens[-1], len(tokens) - 1, w.drafts))
        # At once: a copy and a launch for each request would take most of a small step.
        return runs, log.take(short) if short else None

    @contextmanager
    def _undone_by_errors(self, wanted: Sequence[Wanted]) -> Iterator[None]:
        """Take no state and no page of these requests if what is done inside fails."""
        names = [w.request_id for w in wanted]
        pages = given_back_by_errors(self.cache.blocks, names)
        with self._log.undone_by_errors(names), pages:
            yield

    def _store_behind(self, request_id: Hashable, start: int, states: Tensor) -> None:
        """Store more context rows than a graph holds."""
        end = start + len(states)
        slots = self.cache.slots(request_id, start, end)
        along = {"slots": slots, "positions": array("q", range(start, end))}
        self._store_rows(states, send_arrays(along, self.cache.rows.device))

    def _draw(self, given: BlockInputs, sheet: CapturedSheet) -> Any:
        """Run what a graph holds."""
        metadata = given.metadata.for_capture()
        self._store_rows(given.states, metadata.along)
        self.fill(sheet, self._output([], [], metadata, sheet.width))

    if TYPE_CHECKING:

        def fill(self, sheet: DraftSheet | CapturedSheet, output: BlockOutput) -> None:
            """Choose the drafts."""

        def _reserve(self, wanted: Sequence[Wanted]) -> None: ...

        def _keep(self, wanted: Sequence[Wanted]) -> None: ...

        def _store_rows(self, states: Tensor, sent: Mapping[str, Tensor]) -> None: ...

        def _output(
            self,
            wanted: list[Wanted],
            others: list[DraftRequest],
            metadata: StepMetadata,
            width: int,
        ) -> BlockOutput: ...
