"""The prompt rows of a batch-invariant step: all their keys in order, chunk by chunk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from specmla.chunks import fold_step, plan_chunks
from specmla.host_tables import HostTables, running_starts
from specmla.metadata import ContextPart, PrefillPart, RequestRows
from specmla.workspace import PrefillWorkspace


class FoldTables:
    """Lays out the requests of the prompt part, see `PrefillTables`.

    New rows are keys like any other: chunks of at most the workspace's rows (one chunk without a
    workspace) hold the keys of the requests from the first one on and begin at multiples of
    `fold_step`. Where they end changes no bit.

    Args:
        requests: checked; all of them take the up-projected path.
        page_size: G.
        workspace: where rows are gathered.
    """

    def __init__(
        self,
        requests: Sequence[RequestRows],
        page_size: int,
        workspace: PrefillWorkspace | None = None,
    ) -> None:
        self.requests, self.workspace = requests, workspace
        lens, step = [r.seq_len for r in requests], fold_step(page_size)
        budget = sum(lens) + step if workspace is None else workspace.num_rows
        self.plan = plan_chunks(lens, budget, step) if requests else None

    def add_to(self, tables: HostTables) -> None:
        """Add the arrays to those that are sent."""
        if self.plan is None:
            return
        pieces = [piece for chunk in self.plan.chunks for piece in chunk]
        tables.arrays |= {
            "prompt_query_start": array("i", running_starts(r.query_len for r in self.requests)),
            "kv_slots": tables.slots(
                [self.requests[piece.request] for piece in pieces],
                [piece.start for piece in pieces],
                [piece.end for piece in pieces],
            ),
        }
        spans = [self._span(i) for i in range(len(self.plan.chunks))]
        rows = [running_starts(lens) for _, lens, _, _ in spans]
        keys = [running_starts(lens) for _, _, lens, _ in spans]
        tables.arrays |= {
            "fold_query_start": array("i", chain.from_iterable(rows)),
            "fold_kv_start": array("i", chain.from_iterable(keys)),
            "fold_first_extent": array("i", chain.from_iterable(span[3] for span in spans)),
        }

    def part(self, sent: dict[str, Tensor]) -> PrefillPart | None:
        """Give the part from the tensors that were sent, None without requests."""
        if self.plan is None:
            return None
        query_start = sent["prompt_query_start"]
        lens = tuple(r.query_len for r in self.requests)
        return PrefillPart(
            query_start, query_start, sent["kv_slots"][:0], lens, (0,) * len(lens),
            context=self._chunks(sent), workspace=self.workspace, folded=True,
        )  # fmt: skip

    def _chunks(self, sent: dict[str, Tensor]) -> tuple[ContextPart, ...]:
        assert self.plan is not None
        spans = [self._span(i) for i in range(len(self.plan.chunks))]
        counts = [len(lens) for _, lens, _, _ in spans]
        columns = zip(
            spans,
            sent["fold_query_start"].split([n + 1 for n in counts]),
            sent["fold_kv_start"].split([n + 1 for n in counts]),
            sent["fold_first_extent"].split(counts),
            sent["kv_slots"].split([sum(keys) for _, _, keys, _ in spans]),
            strict=True,
        )
        row_starts = running_starts(r.query_len for r in self.requests)
        return tuple(
            ContextPart(
                row_starts[first],
                row_starts[first + len(lens)],
                PrefillPart(query_start, kv_start, slots, lens, keys, first_extent=extent),
            )
            for (first, lens, keys, _), query_start, kv_start, extent, slots in columns
        )

    def _span(self, index: int) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Give a chunk's first request, and of each up to its last: rows, keys, first extent."""
        assert self.plan is not None
        chunk = self.plan.chunks[index]
        between = self.requests[chunk[0].request : chunk[-1].request + 1]
        return (
            chunk[0].request,
            tuple(r.query_len for r in between),
            tuple(piece.length for piece in chunk),
            tuple(
                r.seq_len - r.query_len + 1 - piece.start
                for r, piece in zip(between, chunk, strict=True)
            ),
        )
