"""The prompt rows of a step: in one pass over all keys where that fits, else chunk by chunk."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import Tensor

from specmla.chunks import ChunkPlan, plan_chunks
from specmla.host_tables import HostTables, running_starts
from specmla.metadata import ContextPart, PrefillPart, RequestRows
from specmla.workspace import PrefillWorkspace


class PrefillTables:
    """Lays out the requests of the prompt part.

    Without a workspace, or where all their keys fit into it, they attend in one pass over gathered
    rows. Else the new rows attend to each other, and the cached context before them is cut into
    chunks of at most the workspace's rows.

    Args:
        requests: checked; all of them take the up-projected path.
        workspace: where cached rows are gathered.
    """

    def __init__(
        self, requests: Sequence[RequestRows], workspace: PrefillWorkspace | None = None
    ) -> None:
        self.requests, self.workspace = requests, workspace
        self.plan: ChunkPlan | None = None
        if workspace is not None and sum(r.seq_len for r in requests) > workspace.num_rows:
            context = [r.seq_len - r.query_len for r in requests]
            self.plan = plan_chunks(context, workspace.num_rows, workspace.page_size)

    def add_to(self, tables: HostTables) -> None:
        """Add the arrays to those that are sent."""
        if not self.requests:
            return
        tables.arrays["prompt_query_start"] = _starts(r.query_len for r in self.requests)
        if self.plan is None:
            firsts, ends = [0] * len(self.requests), [r.seq_len for r in self.requests]
            tables.arrays["kv_slots"] = tables.slots(self.requests, firsts, ends)
            tables.arrays["kv_start"] = _starts(ends)
        else:
            self._add_chunks(tables, self.plan)

    def part(self, sent: dict[str, Tensor]) -> PrefillPart | None:
        """Give the part from the tensors that were sent, None without requests."""
        if not self.requests:
            return None
        query_start = sent["prompt_query_start"]
        query_lens = tuple(r.query_len for r in self.requests)
        if self.plan is None:
            seq_lens = tuple(r.seq_len for r in self.requests)
            return PrefillPart(
                query_start, sent["kv_start"], sent["kv_slots"], query_lens, seq_lens,
                workspace=self.workspace,
            )  # fmt: skip
        return PrefillPart(
            query_start, query_start, sent["slots"][-sum(query_lens) :], query_lens, query_lens,
            context=self._context(sent, self.plan), workspace=self.workspace,
        )  # fmt: skip

    def _add_chunks(self, tables: HostTables, plan: ChunkPlan) -> None:
        pieces = [piece for chunk in plan.chunks for piece in chunk]
        requests = [self.requests[piece.request] for piece in pieces]
        spans = [self._span(plan, i) for i in range(len(plan.chunks))]
        tables.arrays |= {
            "context_slots": tables.slots(
                requests, [piece.start for piece in pieces], [piece.end for piece in pieces]
            ),
            "context_query_start": array(
                "i", chain.from_iterable(running_starts(lens) for _, lens, _ in spans)
            ),
            "context_kv_start": array(
                "i", chain.from_iterable(running_starts(lens) for _, _, lens in spans)
            ),
        }

    def _context(self, sent: dict[str, Tensor], plan: ChunkPlan) -> tuple[ContextPart, ...]:
        spans = [self._span(plan, i) for i in range(len(plan.chunks))]
        if not spans:
            return ()
        sizes = [len(lens) + 1 for _, lens, _ in spans]
        columns = zip(
            spans,
            sent["context_query_start"].split(sizes),
            sent["context_kv_start"].split(sizes),
            sent["context_slots"].split([sum(lens) for _, _, lens in spans]),
            strict=True,
        )
        row_starts = running_starts(r.query_len for r in self.requests)
        return tuple(
            ContextPart(
                first_row=row_starts[first],
                end_row=row_starts[first + len(query_lens)],
                keys=PrefillPart(query_start, kv_start, slots, query_lens, key_lens),
            )
            for (first, query_lens, key_lens), query_start, kv_start, slots in columns
        )

    def _span(self, plan: ChunkPlan, index: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Give a chunk's first request, and rows and keys of each request up to its last one.

        A request without context between them has no keys: an empty state, which changes nothing.
        """
        chunk = plan.chunks[index]
        first, last = chunk[0].request, chunk[-1].request
        keys = {piece.request: piece.length for piece in chunk}
        between = range(first, last + 1)
        return (
            first,
            tuple(self.requests[i].query_len for i in between),
            tuple(keys.get(i, 0) for i in between),
        )


def _starts(lengths: Iterable[int]) -> array[int]:
    return array("i", running_starts(lengths))
