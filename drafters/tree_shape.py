"""Shapes of trees that are drawn: chosen before any token is, so that acceptance stays lossless."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from drafters.best_tree import best_tree
from specmla import ArgumentError

RATES = (0.6, 0.15, 0.07, 0.04)
"""Assumed chances that the eldest child, the second, ... is the one accepted."""
_MAX_KEY = 2**31

Path = tuple[int, ...]
"""A node, by the ranks of its ancestors and itself among their siblings."""


class LevelPlan(NamedTuple):
    """The nodes of one level, by their parents.

    Attributes:
        parents: nodes of the level above that have children, -1 for the anchor.
        most: the largest number of children.
        nodes: all nodes of the level.
        places: for each node, place of its parent in `parents` * most + its rank.
    """

    parents: tuple[int, ...]
    most: int
    nodes: tuple[int, ...]
    places: tuple[int, ...]


class TreePlan:
    """A shape; node i is `paths[i]` and stands after its parent.

    Attributes:
        paths: the nodes.
        parents: place of each one's parent, -1 for the anchor.
        depth: number of levels.
        inner: the nodes that have children, upper levels first.
        place: of each path.
    """

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self.place = {path: i for i, path in enumerate(paths)} | {(): -1}
        self.parents = tuple(self.place[path[:-1]] for path in paths)
        self.depth = max(map(len, paths), default=0)
        inner = {parent for parent in self.parents if parent >= 0}
        self.inner = tuple(sorted(inner, key=lambda node: (len(paths[node]), node)))
        self.levels = tuple(self._level(level) for level in range(self.depth))

    def _level(self, level: int) -> LevelPlan:
        nodes = tuple(node for node, path in enumerate(self.paths) if len(path) == level + 1)
        parents = tuple(sorted({self.parents[node] for node in nodes}))
        most = max(self.paths[node][-1] for node in nodes) + 1
        row = {parent: i for i, parent in enumerate(parents)}
        places = (row[self.parents[node]] * most + self.paths[node][-1] for node in nodes)
        return LevelPlan(parents, most, nodes, tuple(places))

    def key(self, node: int, num_rates: int) -> int:
        """Number a node (-1: the anchor, 0) by its path alone, whatever tree it stands in."""
        key = 0
        for rank in self.paths[node] if node >= 0 else ():
            key = key * num_rates + rank + 1
        return key


@functools.lru_cache(maxsize=256)
def plan_tree(num_nodes: int, depth: int, rates: tuple[float, ...] = RATES) -> TreePlan:
    """Choose the nodes that are likeliest to be accepted, if child k of any node is with rates[k].

    Args:
        num_nodes: most nodes.
        depth: most levels.
        rates: chances that child k is the accepted one, falling; the number of children ends there.
    """
    tree = best_tree([[math.log(rate) for rate in rates]] * depth, num_nodes)
    paths: list[Path] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return TreePlan(tuple(paths))


@functools.lru_cache(maxsize=256)
def union(plans: frozenset[TreePlan]) -> TreePlan:
    """Give one shape that holds all nodes of several."""
    if len(plans) == 1:
        return next(iter(plans))
    paths = {path for plan in plans for path in plan.paths}
    return TreePlan(tuple(sorted(paths, key=lambda path: (len(path), path))))


def deepest(num_rates: int) -> int:
    """Give the most levels whose nodes `TreePlan.key` can number."""
    return int(math.log(_MAX_KEY) / math.log(num_rates + 1)) - 1


def check_rates(rates: tuple[float, ...], depth: int) -> None:
    """Refuse what no tree can be planned from.

    Raises:
        ArgumentError: rates that rise or lie outside (0, 1], a depth that is no integer, below 1
            or so large that nodes can't be numbered; all reasons are listed.
    """
    found = []
    if not rates or not all(0 < r <= 1 for r in rates) or sorted(rates)[::-1] != list(rates):
        found.append(f"rates are {rates}, accepted are falling ones above 0, at most 1")
    most = deepest(max(1, len(rates)))
    if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= most:
        found.append(
            f"depth is {depth!r}, accepted are integers 1 to {most} with {len(rates)} rates"
        )
    if found:
        raise ArgumentError("tree: " + "; ".join(found))
