"""Shared pages: prefixes found by their tokens, forks, copies before writing."""

from __future__ import annotations

import pytest

from specmla.cache import BlockManager
from specmla.errors import ArgumentError, PoolFullError


def grow(manager: BlockManager, name: str, tokens: list[int]) -> None:
    """Reserve and commit everything of `tokens` that `name` doesn't hold yet."""
    manager.reserve({name: len(tokens) - manager.length(name)})
    manager.commit(name, len(tokens), tokens)
    manager.check_integrity()


def cached(page_size: int, tokens: list[int], num_pages: int = 64) -> BlockManager:
    manager = BlockManager(num_pages, page_size)
    manager.add("a", tokens)
    grow(manager, "a", tokens)
    return manager


def owned_pages(manager: BlockManager, *names: str) -> set[int]:
    return {page for name in names for page in manager.block_ids(name)}


def test_drafts_are_never_published() -> None:
    """BL-25: page 4; 7 and 8 fill page 2 as drafts, are rejected, and 9 and 10 follow."""
    manager = cached(4, [1, 2, 3, 4, 5, 6])
    manager.reserve({"a": 4})
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == 4  # while the drafts stand in the page
    manager.commit("a", 6, [1, 2, 3, 4, 5, 6, 9])  # all rejected
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    manager.reserve({"a": 2})
    manager.commit("a", 8, [1, 2, 3, 4, 5, 6, 9, 10, 11])
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert manager.match([1, 2, 3, 4, 5, 6, 9, 10]) == 8
    manager.check_integrity()


def test_drafts_over_two_pages_are_never_published() -> None:
    """BL-25 over two pages: 3 to 10 are drafts that fill pages 1 and 2, none is accepted."""
    manager = cached(4, [1, 2])
    manager.reserve({"a": 9})
    assert manager.match(list(range(1, 13))) == 0
    manager.commit("a", 3, [1, 2, 50])
    assert manager.match(list(range(1, 13))) == 0
    grow(manager, "a", [1, 2, 50, 51, 52, 53, 54, 55])
    assert manager.match([1, 2, 3, 4]) == 0
    assert manager.match([1, 2, 50, 51, 52, 53, 54, 55]) == 8


def test_rolled_back_pages_are_not_found_under_replaced_tokens() -> None:
    """Committed tokens are taken back over two pages and others take their place."""
    manager = cached(4, list(range(1, 13)))
    manager.roll_back("a", 6)
    assert manager.owned("a") == 2
    assert manager.match(list(range(1, 13))) == 4  # page 2 will be written by "a"
    grow(manager, "a", [1, 2, 3, 4, 5, 6, 97, 98, 99, 100, 101, 102])
    assert manager.match(list(range(1, 13))) == 4
    assert manager.match([1, 2, 3, 4, 5, 6, 97, 98, 99, 100, 101, 102]) == 12


def test_rolled_back_page_stays_with_those_who_share_it() -> None:
    manager = cached(4, list(range(1, 10)))
    assert manager.add("b", [*range(1, 9), 50]) == 8
    shared = manager.block_ids("b")[1]
    manager.roll_back("a", 6)
    assert manager.match(list(range(1, 9))) == 8  # "b" still holds it and will not write it
    copies = manager.reserve({"a": 3})
    assert copies == [(shared, manager.block_ids("a")[1])]
    assert manager.block_ids("b")[1] == shared
    manager.commit("a", 9, [1, 2, 3, 4, 5, 6, 70, 80, 90])
    assert manager.match(list(range(1, 9))) == 8
    assert manager.match([1, 2, 3, 4, 5, 6, 70, 80]) == 8
    manager.check_integrity()


def test_page_whose_sharer_left_is_withdrawn_before_it_is_written() -> None:
    manager = cached(4, list(range(1, 10)))
    manager.add("b", [*range(1, 9), 50])
    manager.roll_back("a", 6)
    manager.free("b")
    assert manager.match(list(range(1, 9))) == 8
    assert manager.reserve({"a": 1}) == []
    assert manager.match(list(range(1, 9))) == 4
    manager.check_integrity()


def test_prefix_is_shared_in_full_pages_and_never_whole() -> None:
    tokens = list(range(1, 13))
    for page_size in (1, 2, 3, 4, 5, 12, 13):
        for length in range(1, 14):
            manager = cached(page_size, tokens)
            prompt = [*tokens, 99][:length]
            matched = manager.add("b", prompt)
            assert matched == min(length - 1, 12) // page_size * page_size
            assert manager.length("b") == matched
            assert manager.block_ids("b") == manager.block_ids("a")[: matched // page_size]
            manager.check_integrity()
            grow(manager, "b", prompt)


def test_a_difference_in_an_early_page_ends_the_match() -> None:
    manager = cached(4, list(range(12)))
    assert manager.match([9, 1, 2, 3, *range(4, 12)]) == 0
    assert manager.match([*range(4), 9, 5, 6, 7, *range(8, 12)]) == 4
    assert manager.match(list(range(4, 12))) == 0  # page 2's tokens at page 1's place
    assert manager.match([]) == 0


def test_finished_prefix_stays_until_its_pages_are_needed() -> None:
    manager = cached(4, list(range(12)), num_pages=4)
    manager.free("a")
    assert manager.num_free == 4
    assert manager.match(list(range(12))) == 12
    manager.add("b", [50, 51])
    grow(manager, "b", [50, 51])
    assert manager.match(list(range(12))) == 12  # the plain free page went first
    grow(manager, "b", list(range(50, 55)))
    assert manager.match(list(range(12))) == 8  # the end of a prefix goes before its start
    assert manager.add("c", list(range(12))) == 8
    assert manager.num_free == 0
    manager.check_integrity()


def test_prefix_released_longest_ago_is_evicted_first() -> None:
    manager = BlockManager(4, 2)
    for name, first in (("a", 10), ("b", 20)):
        manager.add(name, [first, first + 1])
        grow(manager, name, [first, first + 1])
    manager.free("a")
    manager.free("b")
    manager.add("a", [10, 11, 12])  # used again: now the youngest
    manager.free("a")
    manager.add("c", [30])
    grow(manager, "c", [30, 31, 32, 33, 34, 35])
    assert manager.match([10, 11]) == 2
    assert manager.match([20, 21]) == 0


def test_prompts_only_share_what_no_verify_wrote() -> None:
    manager, tokens = BlockManager(64, 4, prompts_only=True), list(range(30))
    manager.add("a", tokens[:10])
    for length, is_prompt in ((6, True), (10, True), (14, False), (20, True)):
        manager.reserve({"a": length - manager.length("a")})
        manager.commit("a", length, tokens, is_prompt=is_prompt)
        manager.check_integrity()
    assert manager.match(tokens) == 8  # the next page has two rows of each
    assert manager.add("b", tokens[:9]) == 4  # of the one token left a verify would be made
    assert manager.add("c", tokens[:10]) == 8
    manager.reserve({"c": 12})
    manager.commit("c", 20, tokens, is_prompt=True)
    assert manager.match(tokens) == 20
    manager.fork("a", "d")
    manager.roll_back("d", 9)
    manager.reserve({"d": 3})  # behind one row of a prompt come a prompt's
    manager.commit("d", 12, [*tokens[:9], 50, 51, 52], is_prompt=True)
    assert manager.match([*tokens[:9], 50, 51, 52]) == 12
    manager.check_integrity()


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    manager.add("a", list(range(9)))
    grow(manager, "a", list(range(9)))
    assert manager.match(list(range(9))) == 0
    assert manager.add("b", list(range(9))) == 0
    manager.free("a")
    assert manager.match(list(range(9))) == 0
    manager.check_integrity()


def test_forks_copy_the_tail_before_they_write() -> None:
    manager = cached(4, list(range(6)))
    for child in ("b", "c"):
        manager.fork("a", child)
    assert len(owned_pages(manager, "a", "b", "c")) == 2
    tail = manager.block_ids("a")[1]
    copies = manager.reserve({"a": 3, "b": 3, "c": 3})
    assert [source for source, _ in copies] == [tail, tail]  # the last sharer keeps it
    tails = {manager.block_ids(name)[1] for name in "abc"}
    assert tails == {tail, *(target for _, target in copies)}
    assert len(tails) == 3
    assert {manager.block_ids(name)[0] for name in "abc"} == {manager.block_ids("a")[0]}
    manager.check_integrity()
    for name, new in (("a", 60), ("b", 70), ("c", 80)):
        manager.commit(name, 8, [*range(6), new, new + 1])
    for new in (60, 70, 80):
        assert manager.match([*range(6), new, new + 1]) == 8
    manager.check_integrity()


def test_fork_on_a_page_edge_copies_nothing() -> None:
    manager = cached(4, list(range(8)))
    manager.fork("a", "b")
    assert manager.reserve({"a": 1, "b": 1}) == []
    assert manager.block_ids("a")[:2] == manager.block_ids("b")[:2]
    assert manager.block_ids("a")[2] != manager.block_ids("b")[2]


def test_copies_count_when_the_pool_is_full() -> None:
    manager = cached(4, list(range(6)), num_pages=3)
    manager.fork("a", "b")
    manager.fork("a", "c")
    with pytest.raises(PoolFullError) as error:
        manager.reserve({"a": 1, "b": 1, "c": 1})
    assert (error.value.needed, error.value.free) == (2, 1)
    manager.check_integrity()
    assert len(manager.reserve({"a": 1})) == 1
    manager.free("c")
    assert manager.reserve({"b": 1}) == []
    manager.check_integrity()


def test_fork_takes_the_parents_reservation() -> None:
    """Rows reserved before the fork fall into a page that is shared after it."""
    manager = cached(4, list(range(6)))
    manager.reserve({"a": 2})
    manager.fork("a", "b")
    with pytest.raises(ArgumentError, match=r"length is 8, accepted are 6 \(held\) \.\. 6"):
        manager.commit("a", 8, list(range(8)))
    assert len(manager.reserve({"a": 2})) == 1
    manager.commit("a", 8, list(range(8)))
    manager.check_integrity()


def test_fork_after_a_roll_back_from_a_page_with_reserve() -> None:
    manager = BlockManager(16, 4, lookahead=9)
    manager.add("a", [])
    grow(manager, "a", list(range(7)))
    manager.fork("a", "b")
    assert manager.owned("b") == 2
    manager.check_integrity()
    manager.reserve({"a": 1, "b": 1})
    manager.check_integrity()
