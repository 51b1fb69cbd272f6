from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmla.errors import ArgumentError
from specmla.mask import DraftMask, row_extents, tree_bits, tree_depths
from specmla.testing import random_parents

trees = st.builds(
    lambda size, seed: random_parents(size, random.Random(seed)),
    st.integers(1, 64),
    st.integers(0, 2**32),
)


def ancestors(parents: list[int], node: int) -> set[int]:
    return {node} if parents[node] == -1 else {node} | ancestors(parents, parents[node])


def seen_nodes(word: int) -> set[int]:
    assert -(2**63) <= word < 2**63, "must fit int64"
    return {bit for bit in range(64) if (word >> bit) & 1}


@pytest.mark.parametrize("context", [0, 1, 37, 512])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 5, 8])
def test_row_extents_of_a_chain_end_at_each_rows_own_token(context: int, query_len: int) -> None:
    seq_len = context + query_len
    got = row_extents(DraftMask.CAUSAL, query_len, seq_len)
    assert got == [seq_len - (query_len - 1) + t for t in range(query_len)]
    assert got[-1] == seq_len


@pytest.mark.parametrize(
    ("query_len", "seq_len", "extents"), [(3, 2, [0, 1, 2]), (3, 1, [0, 0, 1]), (2, 0, [0, 0])]
)
def test_row_extents_are_clamped_at_zero(query_len: int, seq_len: int, extents: list[int]) -> None:
    assert row_extents(DraftMask.CAUSAL, query_len, seq_len) == extents


@pytest.mark.parametrize("mask", [DraftMask.FULL, DraftMask.TREE])
def test_row_extents_of_blocks_and_trees_are_the_whole_length(mask: DraftMask) -> None:
    assert row_extents(mask, 3, 65) == [65, 65, 65]
    assert row_extents(mask, 0, 65) == []


@given(trees)
def test_tree_bits_are_the_ancestors(parents: list[int]) -> None:
    words = tree_bits(parents)
    assert [seen_nodes(w) for w in words] == [ancestors(parents, n) for n in range(len(parents))]


@given(trees)
def test_tree_depths_count_the_ancestors(parents: list[int]) -> None:
    assert tree_depths(parents) == [len(ancestors(parents, n)) - 1 for n in range(len(parents))]


def test_tree_bits_of_a_chain_of_64_use_the_sign_bit() -> None:
    words = tree_bits(range(-1, 63))
    assert words[:3] == [1, 3, 7]
    assert words[63] == -1
    assert words[62] == 2**63 - 1
    backwards = tree_bits([*range(1, 64), -1])  # the anchor is the last node
    assert backwards[63] == -(2**63)
    assert backwards[0] == -1


@pytest.mark.parametrize(
    ("parents", "reasons"),
    [
        ([], ["0 nodes"]),
        (range(-1, 64), ["65 nodes"]),
        ([0, 0], ["-1 exactly once"]),
        ([-1, -1, 0], ["-1 exactly once", "[0, 1]"]),
        ([-1, 3, 0], ["outside -1 .. 2", "[3]"]),
        ([-1, -1, 70, *[0] * 62], ["65 nodes", "-1 exactly once", "outside"]),
        ([-1, 2, 1], ["cycle"]),
        ([-1, 1], ["cycle"]),
        ([1, 2, 0, -1, 3], ["cycle"]),
    ],
)
def test_tree_bits_refuses_what_is_no_tree(parents: list[int], reasons: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        tree_bits(parents)
    assert [r for r in reasons if r not in str(caught.value)] == []
