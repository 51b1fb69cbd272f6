"""The likeliest nodes of a tree, best first, of which DDTree and planned shapes are made."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from specmla import ArgumentError


class BestTree(NamedTuple):
    """Nodes, likeliest first, so that each stands after its parent.

    Attributes:
        levels: position of each one's id in the block, 0 for the anchor's children.
        ranks: which of that position's ids it is, 0 for the likeliest.
        parents: place of its parent, -1 for the anchor.
        score: sum of the nodes' chances: how many would be accepted if the marginals were right.
    """

    levels: list[int]
    ranks: list[int]
    parents: list[int]
    score: float


def best_tree(log_probs: Sequence[Sequence[float]], num_nodes: int) -> BestTree:
    """Find the `num_nodes` likeliest nodes, or all there are.

    Args:
        log_probs: for each position the log-probabilities of its likeliest ids, falling. As many as
            nodes are enough; -inf stands for no id.
        num_nodes: most nodes.

    Raises:
        ArgumentError: log-probabilities that rise, are above 0 or NaN.
    """
    for level, row in enumerate(log_probs):
        falls = all(a >= b for a, b in itertools.pairwise(row))
        if not falls or not all(value <= 0 for value in row):
            raise ArgumentError(
                f"best_tree: log_probs[{level}] is {list(row)[:8]}, accepted are falling ones <= 0"
            )
    tree, heap, order = BestTree([], [], [], 0.0), list[tuple[float, int, int, int, int]](), 0
    score = 0.0

    def push(above: float, parent: int, level: int, rank: int) -> None:
        nonlocal order
        if level < len(log_probs) and rank < len(log_probs[level]):
            chance = above + log_probs[level][rank]
            if chance > -math.inf:
                heapq.heappush(heap, (-chance, order, parent, level, rank))
                order += 1

    push(0.0, -1, 0, 0)
    while heap and len(tree.parents) < num_nodes:
        cost, _, parent, level, rank = heapq.heappop(heap)
        tree.levels.append(level)
        tree.ranks.append(rank)
        tree.parents.append(parent)
        score += math.exp(-cost)
        push(-cost, len(tree.parents) - 1, level + 1, 0)
        push(-cost - log_probs[level][rank], parent, level, rank + 1)
    return tree._replace(score=score)
