"""One mask family for the new rows of a request: causal chain, non-causal block, tree.

Every row of a request with Q new rows sees the whole prefix (the `seq_len - Q` tokens before the
new rows). Among the new rows the relation is a Q x Q bit matrix: lower triangle for a chain, all
ones for a block, "is an ancestor of, or is, this node" for a tree. A chain and a block need only a
key extent per row; a tree adds one int64 word per row (bit j set: row t sees new row j), so that
Q <= 64 there.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence

from specmla.errors import ArgumentError, require

MAX_TREE_NODES = 64


class DraftMask(enum.Enum):
    """How the new rows of a request see each other; the prefix is always seen in full."""

    CAUSAL = "causal"
    FULL = "full"
    TREE = "tree"


def row_extents(mask: DraftMask, query_len: int, seq_len: int) -> list[int]:
    """Give the key extent of each new row: row t sees keys with index < extent (and, in a tree,
    among the new rows only those whose bit is set).

    A causal row t sees `seq_len - query_len + 1 + t` keys, clamped at 0: a row that sees nothing
    is the empty state (output 0, LSE -inf).
    """
    if mask is DraftMask.CAUSAL:
        first = seq_len - query_len + 1
        if first >= 0:
            return list(range(first, seq_len + 1))
        return [max(0, first + t) for t in range(query_len)]
    return [seq_len] * query_len


def tree_bits(parents: Sequence[int]) -> list[int]:
    """Turn parent links into one signed int64 ancestor word per node.

    Args:
        parents: parent of each node by index; the anchor is its own root and has parent -1. Nodes
            may come in any order, and exactly one node (the anchor) has parent -1.

    Raises:
        ArgumentError: more than 64 nodes, a parent outside the tree, no root or several, a cycle.
    """
    return list(_ancestor_words(tuple(parents)))


@functools.lru_cache(maxsize=1024)  # engines draft the same few shapes step after step
def _ancestor_words(parents: tuple[int, ...]) -> tuple[int, ...]:
    require(_tree_problems(parents), "tree_bits")
    words = [0] * len(parents)
    for node in range(len(parents)):
        path: list[int] = []
        at = node
        while at != -1 and not words[at] and len(path) <= len(parents):
            path.append(at)
            at = parents[at]
        if len(path) > len(parents):
            raise ArgumentError(f"tree_bits: parents has a cycle through node {node}")
        word = 0 if at == -1 else words[at]
        for below in reversed(path):
            word |= 1 << below
            words[below] = word
    return tuple(w - (1 << 64) if w >> 63 else w for w in words)


def _tree_problems(parents: tuple[int, ...]) -> list[str]:
    n, found = len(parents), []
    if not 1 <= n <= MAX_TREE_NODES:
        found.append(f"parents has {n} nodes, accepted are 1 to {MAX_TREE_NODES} (anchor included)")
    roots = [node for node, parent in enumerate(parents) if parent == -1]
    if n and len(roots) != 1:
        found.append(f"parents must hold -1 exactly once (the anchor), got it at {roots}")
    outside = [parent for parent in parents if not -1 <= parent < n]
    if outside:
        found.append(f"parents {outside} are outside -1 .. {n - 1}")
    return found


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, the anchor at 0: a node's position is the anchor's plus its depth."""
    return list(_depths(tuple(parents)))


@functools.lru_cache(maxsize=1024)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((w & ((1 << 64) - 1)).bit_count() - 1 for w in _ancestor_words(parents))
