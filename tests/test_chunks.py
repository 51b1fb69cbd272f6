"""The chunk planner: every cached row once, in order, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmla.chunks import ChunkPlan, ContextPiece, plan_chunks
from specmla.errors import ArgumentError

lens_strategy = st.lists(st.one_of(st.just(0), st.integers(0, 300)), max_size=8)


@given(lens_strategy, st.integers(1, 70), st.data())
def test_every_row_is_in_one_chunk_in_order_within_the_budget(
    lens: list[int], page_size: int, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(page_size, 4 * page_size + 100))
    plan = plan_chunks(lens, budget, page_size)
    rows = [
        (piece.request, row)
        for chunk in plan.chunks
        for piece in chunk
        for row in range(piece.start, piece.start + piece.length)
    ]
    assert rows == [(r, row) for r, length in enumerate(lens) for row in range(length)]
    for chunk in plan.chunks:
        assert 1 <= sum(piece.length for piece in chunk) <= budget
        assert all(piece.length >= 1 and piece.start % page_size == 0 for piece in chunk)
        assert all(piece.start == 0 for piece in chunk[1:]), "only the first may go on"
    for chunk, following in zip(plan.chunks, plan.chunks[1:], strict=False):
        used = sum(piece.length for piece in chunk)
        more = min(following[0].length, page_size)
        assert used + more > budget, "a chunk ends only where not another page fits"


@pytest.mark.parametrize(
    ("lens", "budget", "page_size", "chunks"),
    [
        ([0, 0], 16, 16, []),
        ([], 16, 16, []),
        ([16], 16, 16, [[(0, 0, 16)]]),
        ([17], 16, 16, [[(0, 0, 16)], [(0, 16, 1)]]),
        ([5, 0, 40], 33, 16, [[(0, 0, 5), (2, 0, 16)], [(2, 16, 24)]]),
        ([30, 10, 20], 32, 16, [[(0, 0, 30)], [(1, 0, 10), (2, 0, 20)]]),
        ([1] * 4, 3, 1, [[(0, 0, 1), (1, 0, 1), (2, 0, 1)], [(3, 0, 1)]]),
        ([100], 70, 64, [[(0, 0, 64)], [(0, 64, 36)]]),
    ],
)
def test_plans_by_hand(
    lens: list[int], budget: int, page_size: int, chunks: list[list[tuple[int, int, int]]]
) -> None:
    plan = plan_chunks(lens, budget, page_size)
    assert [[tuple(piece) for piece in chunk] for chunk in plan.chunks] == chunks


def test_bad_budgets_and_lengths_are_refused_with_all_reasons() -> None:
    with pytest.raises(ArgumentError) as caught:
        plan_chunks([4, -1, -2], 15, 16)
    wanted = ["row_budget is 15, accepted is a page (16) or more", "request 1 is -1",
              "request 2 is -2"]  # fmt: skip
    assert [text for text in wanted if text not in str(caught.value)] == []
    with pytest.raises(ArgumentError, match=r"page_size is 0.*; row_budget is 0"):
        plan_chunks([1], 0, 0)


@pytest.mark.parametrize(
    ("row_budget", "page_size", "reason"),
    [
        (float("nan"), 16, "row_budget is nan, accepted are integers >= 1"),
        (48, 0, "page_size is 0, accepted are integers >= 1"),
        (48, "16", "page_size is '16', accepted are integers"),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(
    row_budget: Any, page_size: Any, reason: str
) -> None:
    with pytest.raises(ArgumentError, match=reason):
        plan_chunks([5], row_budget, page_size)


def plan(*chunks: list[tuple[int, int, int]], lens: tuple[int, ...] = (40, 20)) -> ChunkPlan:
    made = tuple(tuple(ContextPiece(*piece) for piece in chunk) for chunk in chunks)
    return ChunkPlan(lens, 48, 16, made)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([[(0, 0, 40)], [(1, 0, 10), (1, 10, 10)]], "starts at 10, accepted are multiples of"),
        ([[(0, 0, 32)], [(1, 0, 20), (0, 32, 8)]], "go on with a request, only the first piece"),
        ([[(0, 0, 40), (1, 0, 20)]], "chunk 0: holds 60 rows, accepted are 1 to row_budget (48)"),
        ([[(0, 0, 40)], [], [(1, 0, 20)]], "chunk 1: holds 0 rows"),
        ([[(0, 0, 40)]], "request 1 has 20 rows, its pieces cover 0 in turn"),
        ([[(0, 0, 32)], [(1, 0, 20)]], "request 0 has 40 rows, its pieces cover 32"),
        ([[(0, 0, 40)], [(1, 0, 20)], [(1, 0, 20)]], "is out of turn"),
        ([[(1, 0, 20)], [(0, 0, 40)]], "request 0 has 40 rows, its pieces cover 0"),
        ([[(0, 0, 48)], [(1, 0, 20)]], "request 0 has 40 rows, its pieces cover 48"),
        ([[(0, 0, 40)], [(1, 0, 20)], [(2, 0, 1)]], "request=2, start=0, length=1) is out of turn"),
        ([[(0, 0, 40), (1, 0, 0)], [(1, 0, 20)]], "has length 0, accepted are values >= 1"),
    ],
)
def test_a_plan_made_elsewhere_that_breaks_a_rule_is_refused(
    chunks: list[list[tuple[int, int, int]]], reason: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan(*chunks)
    assert reason in str(caught.value)


def test_a_plan_made_elsewhere_may_leave_chunks_emptier() -> None:
    assert len(plan([(0, 0, 16)], [(0, 16, 24)], [(1, 0, 20)]).chunks) == 3
