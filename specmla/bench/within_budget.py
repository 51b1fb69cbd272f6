"""Pieces of work while time is left for one more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

FIRST_S = 20.0
"""What a piece may cost before one was measured: kernels are compiled."""
SLACK = 1.5
RECENT = 8

Piece = TypeVar("Piece")


def within_budget(
    pieces: Sequence[Piece], budget_s: float, clock: Callable[[], float], start: float
) -> Iterator[Piece]:
    """Give pieces while the longest of the last few would still fit into the budget."""
    recent = deque([FIRST_S], maxlen=RECENT)
    for piece in pieces:
        before = clock()
        if before - start + SLACK * max(recent) > budget_s:
            return
        yield piece
        recent.append(clock() - before)
