"""Trees of drafts: which nodes of a proposal are verified, and their tables on the device.

A drafter gives the parent of each of its nodes, -1 for the anchor. In the step the anchor is row 0
and the nodes are rows 1 .. K of their request, in the drafter's order, which is free: a child may
stand before its parent. Only the order among siblings means something: the one in which they were
drawn, and in which they are tried.

A chain is the tree in which each node is the only child of the one before it; in a step with trees
chains and requests without drafts get tables of their own.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import require
from specmla.mask import MAX_TREE_NODES, tree_bits, tree_depths

MAX_DRAFT_NODES = MAX_TREE_NODES - 1
"""Most drafts of a tree: the anchor is a node as well."""


class DraftTree(NamedTuple):
    """The nodes of a request's tree that are verified.

    Attributes:
        nodes: their places in the proposal, in rising order.
        parents: [K] row of each one's parent; the anchor is row 0, the nodes are rows 1 .. K.
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        """Whether these are the first nodes of the proposal, each hanging on the one before."""
        return self.nodes == self.parents == tuple(range(len(self.nodes)))

    @property
    def row_parents(self) -> tuple[int, ...]:
        """Parents of all K + 1 rows as `RequestRows` takes them: -1 for the anchor."""
        return (-1, *self.parents)


class TreeShape(NamedTuple):
    """What follows from the parents of K nodes, each a tuple of K integers.

    Attributes:
        words: bit j set: row j is the node itself or one of its ancestors (the anchor is bit 0).
        depths: 1 for the anchor's children.
        ranks: how many siblings stand before the node.
    """

    words: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]


def node_parents(parents: Sequence[int]) -> tuple[int, ...]:
    """Give the row of each node's parent, of a drafter's parents (-1 for the anchor).

    Raises:
        ArgumentError: more than 63 nodes, what is no integer, a parent outside the tree, a cycle.
    """
    require(parent_problems(parents), "node_parents")
    return tuple(operator.index(parent) + 1 for parent in parents)


def parent_problems(parents: object) -> list[str]:
    """List why `parents` are not those of a drafter's nodes, with the numbers that it gave."""
    accepted = "accepted are integers, -1 for the anchor or the place of another draft"
    if isinstance(parents, str | bytes) or not isinstance(parents, Iterable):
        return [f"is {parents!r}, {accepted}"]
    given = list(parents)
    try:
        return list(_shape_problems(tuple(map(operator.index, given))))
    except TypeError:
        return [f"holds {[p for p in given if not hasattr(p, '__index__')][:8]}, {accepted}"]


@functools.lru_cache(maxsize=1024)
def _shape_problems(parents: tuple[int, ...]) -> tuple[str, ...]:
    n, found = len(parents), []
    if n > MAX_DRAFT_NODES:
        found.append(f"has {n} nodes, accepted are at most {MAX_DRAFT_NODES}")
    outside = [parent for parent in parents if not -1 <= parent < n]
    if outside:
        found.append(f"holds {outside[:8]}, outside -1 .. {n - 1}")
    if found:
        return tuple(found)
    for node in range(n):
        at = node
        for _ in range(n):
            at = parents[at] if at >= 0 else at
        if at >= 0:
            return (f"has a cycle: draft {node} does not hang on the anchor",)
    return ()


@functools.lru_cache(maxsize=1024)  # drafters propose the same few shapes step after step
def tree_shape(parents: tuple[int, ...]) -> TreeShape:
    """Measure a tree by the row of each node's parent, as in `DraftTree`."""
    rows = (-1, *parents)
    seen: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return TreeShape(tuple(tree_bits(rows)[1:]), tuple(tree_depths(rows)[1:]), tuple(ranks))


def keep_nodes(parents: Sequence[int], num_nodes: int, num_levels: int) -> DraftTree:
    """Give the nodes that fit, upper levels first and in order inside a level.

    What is left out depends on the shape alone, never on a drafted token, so acceptance stays
    lossless.

    Args:
        parents: the drafter's, -1 for the anchor.
        num_nodes: most nodes.
        num_levels: greatest depth.
    """
    # Limits that are out of reach are all the same: far from its end a request's tree is known.
    return _keep(tuple(parents), min(num_nodes, MAX_DRAFT_NODES), min(num_levels, MAX_DRAFT_NODES))


@functools.lru_cache(maxsize=1024)
def _keep(parents: tuple[int, ...], num_nodes: int, num_levels: int) -> DraftTree:
    rows = node_parents(parents)
    depths = tree_shape(rows).depths
    if len(rows) <= num_nodes and max(depths, default=0) <= num_levels:
        return DraftTree(tuple(range(len(rows))), rows)
    by_level = sorted(range(len(rows)), key=lambda node: (depths[node], node))
    nodes = sorted(node for node in by_level[:num_nodes] if depths[node] <= num_levels)
    place = {0: 0} | {node + 1: row for row, node in enumerate(nodes, start=1)}
    return DraftTree(tuple(nodes), tuple(place[rows[node]] for node in nodes))


@dataclass(frozen=True)
class TreeTables:
    """The trees of a step on the device; cells past a request's nodes belong to no tree.

    Attributes:
        parents: [B, K] int64, row of each node's parent.
        words: [B, K] int64, see `TreeShape`.
        depths: [B, K] int64, 1 for the anchor's children.
        ranks: [B, K] int64, how many siblings stand before the node.
        order: [n] int64, all nodes as b * K + node, those of rank 0 first, then those of rank 1 ...
        rank_ends: where each rank ends in `order`, on the host.
        is_tree: the requests whose tree is no chain, by place in the step, on the host.
        padded: `order` may name the cell after the last one, which is no node.
    """

    parents: Tensor
    words: Tensor
    depths: Tensor
    ranks: Tensor
    order: Tensor
    rank_ends: tuple[int, ...]
    is_tree: tuple[bool, ...]
    padded: bool = False


def tree_arrays(
    trees: Sequence[DraftTree | None], counts: Sequence[int], width: int
) -> dict[str, array[int]]:
    """Give the tables of a step with trees, to travel in the same copy as its metadata.

    Args:
        trees: of each request; None for a chain.
        counts: nodes of each request.
        width: K.
    """
    rows = [_table_rows(parents, width) for parents in _all_parents(trees, counts)]
    found = {}
    for i, name in enumerate(TREE_TABLES):
        found[name] = array("q")
        found[name].frombytes(b"".join(row[i] for row in rows))
    return found


@functools.lru_cache(maxsize=1024)
def _table_rows(parents: tuple[int, ...], width: int) -> tuple[bytes, ...]:
    """Give a request's row of each table, as int64."""
    missing = [0] * (width - len(parents))
    return tuple(array("q", [*row, *missing]).tobytes() for row in (parents, *tree_shape(parents)))


def tree_tables(
    sent: Mapping[str, Tensor], trees: Sequence[DraftTree | None], counts: Sequence[int]
) -> TreeTables:
    """Put together what `tree_arrays` gave for these requests, once it is on the device."""
    rows = _all_parents(trees, counts)
    ends = _rank_ends(rows)
    parents, words, depths, ranks = tree_views(sent, len(trees))
    return TreeTables(
        parents,
        words,
        depths,
        ranks,
        order=_by_rank(ranks, depths, ends[-1] if ends else 0),
        rank_ends=ends,
        is_tree=tuple(parents != tuple(range(len(parents))) for parents in rows),
    )


def tree_views(sent: Mapping[str, Tensor], num_requests: int) -> tuple[Tensor, ...]:
    """Give parents, words, depths and ranks [B, K] of what was sent."""
    return tuple(sent[name].view(num_requests, -1) for name in TREE_TABLES)


def _by_rank(ranks: Tensor, depths: Tensor, count: int) -> Tensor:
    """Order the `count` nodes by rank, and by place among equal ones; padding comes last."""
    last = torch.where(depths > 0, ranks, ranks.shape[1])
    return last.view(-1).argsort(stable=True)[:count]


def _rank_ends(all_parents: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Count the nodes of rank 0, of ranks 0 and 1, and so on, over several trees."""
    counts = Counter(chain.from_iterable(tree_shape(parents).ranks for parents in all_parents))
    return tuple(accumulate(counts[rank] for rank in range(len(counts))))


TREE_TABLES = ("tree.parents", "tree.words", "tree.depths", "tree.ranks")


def _all_parents(trees: Sequence[DraftTree | None], counts: Sequence[int]) -> list[tuple[int, ...]]:
    return [
        tuple(range(count)) if tree is None else tree.parents
        for tree, count in zip(trees, counts, strict=True)
    ]
