"""The points of the grid, in the order in which a run that may be cut short measures them."""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

from specmla.mask import DraftMask

MAX_TOKENS = 1 << 20
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1, 4, 8, 32, 128)
"""In 1024 tokens."""
HEADS = (16, 32, 64, 128)
QUERY_LENS = (1, 2, 4, 8)
COARSE = ((1, 8, 32, 128), (1, 8, 128), (16, 128), (1, 4))
"""The sub-grid that comes before the rest, in the same four dimensions."""

EVERYWHERE = ("hopper", "flashmla", "fa3")
SOMEWHERE = ("triton", "rows")
"""Measured at `FEW` only: they are no rivals at most points and cost as much time."""


class Point(NamedTuple):
    """One row of the grid but for the provider.

    Attributes:
        batch: in the batch grammar.
        heads, mask, page_size: H, relation of the new rows (its name), G.
    """

    batch: str
    heads: int
    mask: str = DraftMask.CAUSAL.value
    page_size: int = 64


TARGETS = (
    Point("32q4s8k", 16),
    Point("128q4s4k", 16),
    Point("32q2s8k", 128),
    Point("1q4s4k", 16),
    Point("1q4s128k", 16),
    Point("32q1-8s8k", 16),
    Point("32q1-4s8k", 128),
    Point("32q16s8k", 16, DraftMask.TREE.value),
    Point("32q16s8k", 16),
)
RAGGED = (
    Point("32q1-4s8k", 16),
    Point("32q1-8s8k", 128),
    Point("128q1-4s4k", 16),
    Point("128q1-8s4k", 16),
    Point("8q1-8s8k", 32),
)
MIXED = tuple(Point(f"1q{q}s64k,31q{q}s1k", heads) for heads, q in product((16, 128), (1, 4)))
TREES = (
    Point("32q8s8k", 16, DraftMask.TREE.value),
    Point("32q8s8k", 128, DraftMask.TREE.value),
    Point("32q16s8k", 128, DraftMask.TREE.value),
    Point("32q16s8k", 128),
    Point("1q16s8k", 16, DraftMask.TREE.value),
    Point("1q16s8k", 16),
)
PAGES = tuple(
    Point(batch, heads, page_size=page)
    for page in (16, 32)
    for batch, heads in (("32q4s8k", 16), ("32q2s8k", 128), ("128q1s4k", 16))
)
FEW = frozenset(
    {
        *TARGETS,
        Point("32q1s8k", 16),
        Point("32q8s8k", 16),
        Point("8q4s1k", 16),
        Point("128q1s4k", 128),
        MIXED[1],
        PAGES[0],
    }
)


def is_regular(point: Point) -> bool:
    """Tell whether it lies on the regular grid: one Q, one length, causal, pages of 64."""
    plain = point.mask == DraftMask.CAUSAL.value and point.page_size == 64
    return plain and point in _REGULAR


def select(subsets: tuple[str, ...] = ()) -> list[Point]:
    """Give the points of these subsets (all if none is named), each once, in order."""
    chosen = [name for name in SUBSETS if not subsets or name in subsets]
    return list(dict.fromkeys(point for name in chosen for point in SUBSETS[name]))


def providers_of(point: Point, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out what is measured at a few points only, at all others."""
    return tuple(name for name in wanted if name not in SOMEWHERE or point in FEW)


def _grid(
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    heads: tuple[int, ...],
    lens: tuple[int, ...],
) -> list[Point]:
    return [
        Point(f"{b}q{q}s{s}k", h)
        for b, s, h, q in product(batches, contexts, heads, lens)
        if b * s * 1024 <= MAX_TOKENS
    ]


def _shuffled(points: list[Point]) -> tuple[Point, ...]:
    # A run that ends early has then seen a fair sample of every dimension.
    return tuple(random.Random(0).sample(points, len(points)))


_ALL = _grid(BATCHES, CONTEXTS, HEADS, QUERY_LENS)
_REGULAR = frozenset(_ALL)

SUBSETS: dict[str, tuple[Point, ...]] = {
    "targets": TARGETS,
    "few": tuple(sorted(FEW)),
    "ragged": RAGGED,
    "mixed": MIXED,
    "tree": TREES,
    "pages": PAGES,
    "coarse": _shuffled(_grid(*COARSE)),
    "rest": _shuffled(_ALL),
}
