"""Cuts the cached context of a batch of prompts into chunks that fit one workspace; host only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specmla.errors import count_problems, require

KEY_STEP = 64
"""Keys that are folded in parts are cut at multiples of this; each block of the kernel divides it.
"""


def fold_step(page_size: int) -> int:
    """Give what folded chunks begin at multiples of: whole pages and whole blocks of keys."""
    return math.lcm(page_size, KEY_STEP)


class ContextPiece(NamedTuple):
    """Cached rows `start .. start + length - 1` of one request."""

    request: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """First row after it."""
        return self.start + self.length


@dataclass(frozen=True)
class ChunkPlan:
    """Which cached rows are gathered together, chunk after chunk.

    A plan made elsewhere is held to the same rules as those of `plan_chunks`.

    Attributes:
        context_lens: cached rows of each request, new rows left out; 0 for none.
        row_budget: most rows of a chunk, the workspace's.
        page_size: G; pieces begin at multiples of it.
        chunks: pieces of each chunk in order of the requests. Each row of every context is in one
            piece, in order; only the first piece of a chunk may go on with a request that an
            earlier chunk began.

    Raises:
        ArgumentError: a plan that breaks a rule; all reasons are listed.
    """

    context_lens: tuple[int, ...]
    row_budget: int
    page_size: int
    chunks: tuple[tuple[ContextPiece, ...], ...]

    def __post_init__(self) -> None:
        """Refuse a plan that breaks a rule."""
        found = _size_problems(self.context_lens, self.row_budget, self.page_size)
        for i, chunk in enumerate(self.chunks):
            found += [f"chunk {i}: {text}" for text in self._chunk_problems(chunk)]
        require(found or self._order_problems(), "ChunkPlan")

    def _chunk_problems(self, chunk: tuple[ContextPiece, ...]) -> list[str]:
        found, rows = [], sum(piece.length for piece in chunk)
        if not 1 <= rows <= self.row_budget:
            found.append(f"holds {rows} rows, accepted are 1 to row_budget ({self.row_budget})")
        for piece in chunk:
            if piece.length < 1:
                found.append(f"{piece} has length {piece.length}, accepted are values >= 1")
            if piece.start % self.page_size:
                found.append(
                    f"{piece} starts at {piece.start}, accepted are multiples of page_size "
                    f"({self.page_size})"
                )
        later = [piece for piece in chunk[1:] if piece.start]
        if later:
            found.append(f"{later} go on with a request, only the first piece of a chunk may")
        return found

    def _order_problems(self) -> list[str]:
        pieces = [piece for chunk in self.chunks for piece in chunk]
        found, at = [], 0
        for request, length in enumerate(self.context_lens):
            end = 0
            while at < len(pieces) and pieces[at].request == request and pieces[at].start == end:
                end, at = pieces[at].end, at + 1
            if end != length:
                found.append(f"request {request} has {length} rows, its pieces cover {end} in turn")
        if at < len(pieces):
            found.append(f"{pieces[at]} is out of turn")
        return found


def plan_chunks(context_lens: Sequence[int], row_budget: int, page_size: int) -> ChunkPlan:
    """Pack contexts into as few chunks as rows and page borders allow.

    A request that does not fit into what is left of a chunk is split at the last page border that
    does, and goes on in the next chunk. A request without context is in no chunk.

    Args:
        context_lens: cached rows of each request.
        row_budget: most rows of a chunk, at least a page.
        page_size: G.

    Raises:
        ArgumentError: a negative length, a budget below one page; all reasons are listed.
    """
    lens = tuple(context_lens)
    require(_size_problems(lens, row_budget, page_size), "plan_chunks")
    chunks: list[tuple[ContextPiece, ...]] = []
    pieces: list[ContextPiece] = []
    room = row_budget
    for request, length in enumerate(lens):
        start = 0
        while start < length:
            take = min(length - start, room)
            if start + take < length:
                take -= take % page_size
            if take:
                pieces.append(ContextPiece(request, start, take))
                start, room = start + take, room - take
            if start < length:
                chunks.append(tuple(pieces))
                pieces, room = [], row_budget
    if pieces:
        chunks.append(tuple(pieces))
    return ChunkPlan(lens, row_budget, page_size, tuple(chunks))


def _size_problems(context_lens: Sequence[int], row_budget: int, page_size: int) -> list[str]:
    found = count_problems({"page_size": page_size, "row_budget": row_budget})
    if not found and row_budget < page_size:
        found.append(f"row_budget is {row_budget}, accepted is a page ({page_size}) or more")
    found += [
        f"context_lens of request {i} is {length}, accepted are values >= 0"
        for i, length in enumerate(context_lens)
        if length < 0
    ]
    return found
