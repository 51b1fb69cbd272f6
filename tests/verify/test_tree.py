"""Trees of drafts: shapes, cuts, tables."""

from __future__ import annotations

import random

import pytest
import torch

from specmla.errors import ArgumentError
from specmla.staging import send_arrays
from specmla.verify.tree import (
    MAX_DRAFT_NODES,
    DraftTree,
    keep_nodes,
    node_parents,
    tree_arrays,
    tree_shape,
    tree_tables,
)


def random_parents(count: int, seed: int) -> list[int]:
    """Give a tree in a random node order, -1 for the anchor."""
    rng = random.Random(seed)
    grown = [rng.randrange(-1, node) for node in range(count)]
    order = rng.sample(range(count), count)  # order[old] is the new name
    parents = [0] * count
    for node, parent in enumerate(grown):
        parents[order[node]] = -1 if parent < 0 else order[parent]
    return parents


def ancestors(parents: list[int], node: int) -> list[int]:
    """Give the path from the anchor's child to the node."""
    path = [node]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("count", [1, 2, 5, 17, MAX_DRAFT_NODES])
def test_shape_says_ancestors_depths_and_elder_siblings(count: int) -> None:
    for seed in range(20):
        parents = random_parents(count, seed)
        shape = tree_shape(node_parents(parents))
        for node in range(count):
            path = ancestors(parents, node)
            want = 1 | sum(1 << (at + 1) for at in path)
            assert shape.words[node] & (2**64 - 1) == want
            assert shape.depths[node] == len(path)
            assert shape.ranks[node] == parents[:node].count(parents[node])


@pytest.mark.parametrize(
    ("parents", "reason"),
    [
        ([-1] * 64, "has 64 nodes, accepted are at most 63"),
        ([-1, 2], r"holds \[2\], outside -1 .. 1"),
        ([-1, 2, 1], "has a cycle: draft 1 does not hang on the anchor"),
        ([0], "cycle"),
        ([-2], r"holds \[-2\], outside"),
        ([-1, 0.7], r"holds \[0.7\], accepted are integers"),
    ],
)
def test_what_is_no_tree_is_refused(parents: list[int], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        node_parents(parents)


def test_cut_keeps_upper_levels_and_whole_paths() -> None:
    for seed in range(60):
        count = 1 + seed % 20
        parents = random_parents(count, seed)
        depths = [len(ancestors(parents, node)) for node in range(count)]
        for most, levels in [(count, 99), (3, 99), (count, 2), (4, 2), (0, 5), (5, 0)]:
            tree = keep_nodes(parents, most, levels)
            assert list(tree.nodes) == sorted(set(tree.nodes))
            assert len(tree.nodes) == min(most, sum(d <= levels for d in depths))
            kept = [depths[node] for node in tree.nodes]
            left = [d for node, d in enumerate(depths) if node not in tree.nodes and d <= levels]
            assert max(kept, default=0) <= min(left, default=levels)
            for row, node in enumerate(tree.nodes, start=1):
                parent = tree.parents[row - 1]
                assert (-1 if parent == 0 else tree.nodes[parent - 1]) == parents[node]


def test_chains_are_recognised() -> None:
    assert keep_nodes([-1, 0, 1], 9, 9).is_chain
    assert keep_nodes([-1, 0, 1], 2, 9).is_chain
    assert keep_nodes([-1, -1, 0, 2], 9, 0).is_chain  # nothing is left
    assert not keep_nodes([1, -1], 9, 9).is_chain  # a path, but its rows stand otherwise
    assert not keep_nodes([-1, -1, 1], 9, 9).is_chain


def test_tables_hold_every_request() -> None:
    trees = [DraftTree((0, 1, 2), (0, 0, 1)), None, None, DraftTree((0, 2), (2, 0))]
    counts = [3, 2, 0, 2]
    sent = send_arrays(tree_arrays(trees, counts, 4), torch.device("cpu"))
    tables = tree_tables(sent, trees, counts)
    assert tables.parents.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0] * 4, [2, 0, 0, 0]]
    assert tables.depths.tolist() == [[1, 1, 2, 0], [1, 2, 0, 0], [0] * 4, [2, 1, 0, 0]]
    assert tables.ranks.tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    assert tables.words.tolist()[0] == [0b11, 0b101, 0b1011, 0]
    assert tables.words.tolist()[3] == [0b111, 0b101, 0, 0]
    assert tables.order.tolist() == [0, 2, 4, 5, 12, 13, 1]
    assert tables.rank_ends == (6, 7)
    assert tables.is_tree == (True, False, False, True)
