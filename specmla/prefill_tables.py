"""The prompt rows of a step: in one pass over all keys where that fits, else chunk by chunk."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import Tensor

from specmla.chunks import ContextPiece, plan_chunks
from specmla.host_tables import HostTables, running_starts
from specmla.metadata import ContextPart, PrefillPart, RequestRows
from specmla.workspace import PrefillWorkspace


class PrefillTables:
    """Lays out the requests of the prompt part.

    Without a workspace, or where all their keys fit into it, they attend in one pass over gathered
    rows. Else the cached context is cut into chunks of at most the workspace's rows. New rows come
    last, with the last chunk where both fit into the workspace: each pass over the rows costs time.

    Args:
        requests: checked; all of them take the up-projected path.
        workspace: where cached rows are gathered.
    """

    def __init__(
        self, requests: Sequence[RequestRows], workspace: PrefillWorkspace | None = None
    ) -> None:
        self.requests, self.workspace = requests, workspace
        self.chunks: tuple[tuple[ContextPiece, ...], ...] = ()
        self.firsts = [0] * len(requests)
        if workspace is not None and sum(r.seq_len for r in requests) > workspace.num_rows:
            self.chunks, self.firsts = _cut(requests, workspace)

    def add_to(self, tables: HostTables) -> None:
        """Add the arrays to those that are sent."""
        if not self.requests:
            return
        ends = [r.seq_len for r in self.requests]
        tables.arrays |= {
            "prompt_query_start": _starts(r.query_len for r in self.requests),
            "kv_slots": tables.slots(self.requests, self.firsts, ends),
            "kv_start": _starts(map(operator.sub, ends, self.firsts)),
        }
        if self.chunks:
            self._add_chunks(tables)

    def part(self, sent: dict[str, Tensor]) -> PrefillPart | None:
        """Give the part from the tensors that were sent, None without requests."""
        if not self.requests:
            return None
        return PrefillPart(
            sent["prompt_query_start"],
            sent["kv_start"],
            sent["kv_slots"],
            tuple(r.query_len for r in self.requests),
            tuple(r.seq_len - first for r, first in zip(self.requests, self.firsts, strict=True)),
            context=self._context(sent) if self.chunks else (),
            workspace=self.workspace,
        )

    def _add_chunks(self, tables: HostTables) -> None:
        pieces = [piece for chunk in self.chunks for piece in chunk]
        requests = [self.requests[piece.request] for piece in pieces]
        spans = [self._span(chunk) for chunk in self.chunks]
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

    def _context(self, sent: dict[str, Tensor]) -> tuple[ContextPart, ...]:
        spans = [self._span(chunk) for chunk in self.chunks]
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

    def _span(
        self, chunk: tuple[ContextPiece, ...]
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Give a chunk's first request, and rows and keys of each request up to its last one.

        A request without context between them has no keys: an empty state, which changes nothing.
        """
        first, last = chunk[0].request, chunk[-1].request
        keys = {piece.request: piece.length for piece in chunk}
        between = range(first, last + 1)
        return (
            first,
            tuple(self.requests[i].query_len for i in between),
            tuple(keys.get(i, 0) for i in between),
        )


def _cut(
    requests: Sequence[RequestRows], workspace: PrefillWorkspace
) -> tuple[tuple[tuple[ContextPiece, ...], ...], list[int]]:
    """Give the chunks, and the first key of each request that is attended to with its new rows."""
    firsts = [r.seq_len - r.query_len for r in requests]
    chunks = plan_chunks(firsts, workspace.num_rows, workspace.page_size).chunks
    last = chunks[-1] if chunks else ()
    held = sum(piece.length for piece in last) + sum(r.query_len for r in requests)
    if last and held <= workspace.num_rows:
        for piece in last:
            firsts[piece.request] = piece.start
        chunks = chunks[:-1]
    return chunks, firsts


def _starts(lengths: Iterable[int]) -> array[int]:
    return array("i", running_starts(lengths))
