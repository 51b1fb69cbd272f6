"""Page accounting of reservations, commits and roll-backs."""

from __future__ import annotations

import pytest
import torch

from specmla.cache import BlockManager, LatentCache
from specmla.errors import ArgumentError, PoolFullError


def ceil(tokens: int, page: int) -> int:
    return -(-tokens // page)


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


def test_step_has_pages_for_every_draft_row() -> None:
    """BL-21: n cached tokens, the anchor and k drafts, for every n and k; page 16."""
    for n in range(1, 41):
        for k in range(9):
            manager = BlockManager(8, 16)
            manager.add("a", list(range(n + 1)))
            grow(manager, "a", list(range(n)))
            manager.reserve({"a": 1 + k})
            assert manager.owned("a") == ceil(n + 1 + k, 16)
            assert len(set(manager.block_ids("a"))) == manager.owned("a")
            assert manager.num_free == 8 - manager.owned("a")
            manager.check_integrity()


def test_full_pool_refuses_and_leaves_no_half_made_reservation() -> None:
    """BL-21: for every n and k, a pool one page short of the step's need."""
    for n in range(1, 41):
        for k in range(9):
            total = 2 * ceil(n + 1 + k, 16) - 1
            manager = BlockManager(total, 16, prefix_caching=False)
            if total < 2 * ceil(n, 16):
                continue
            for name in ("a", "b"):
                manager.add(name, list(range(n + 1)))
                grow(manager, name, list(range(n)))
            before = [(list(manager.block_ids(x)), manager.length(x)) for x in ("a", "b")]
            free = manager.num_free
            with pytest.raises(PoolFullError) as error:
                manager.reserve({"a": 1 + k, "b": 1 + k})
            assert error.value.free == free == manager.num_free
            assert error.value.needed == total + 1 - 2 * ceil(n, 16)
            assert error.value.total == total
            assert before == [(list(manager.block_ids(x)), manager.length(x)) for x in ("a", "b")]
            manager.check_integrity()
            manager.reserve({"a": 1 + k})  # one of them fits


def test_rejected_drafts_give_their_pages_back() -> None:
    """BL-23: page 16, rows 30 to 33 of an anchor and three drafts."""
    for kept, length, pages in ((1, 31, 2), (2, 32, 2), (3, 33, 3), (4, 34, 3)):
        manager = cached(16, list(range(30)), num_pages=5)
        manager.reserve({"a": 4})
        assert manager.owned("a") == 3
        manager.commit("a", 30 + kept, list(range(35)))
        assert (manager.length("a"), manager.owned("a")) == (length, pages)
        manager.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 3, 20])
@pytest.mark.parametrize("accepted", [(0, 1, 2, 3, 4), (0,), (4,)])
def test_two_hundred_steps_leak_nothing(accepted: tuple[int, ...], lookahead: int) -> None:
    """BL-23: k = 4; owned pages are those of length + declared look-ahead after each step."""
    manager = BlockManager(80, 16, lookahead=lookahead)
    tokens = list(range(7))
    manager.add("a", tokens)
    grow(manager, "a", tokens)
    for step in range(200):
        if len(tokens) > 1000:
            tokens = tokens[:33]
            manager.roll_back("a", 33)
            assert manager.owned("a") == 3
        manager.reserve({"a": 5})
        assert manager.owned("a") == ceil(len(tokens) + 5 + lookahead, 16)
        tokens += [step * 10 + j for j in range(1 + accepted[step % len(accepted)])]
        manager.commit("a", len(tokens), tokens)
        assert manager.owned("a") == ceil(len(tokens) + lookahead, 16)
        assert manager.num_free + len(owned_pages(manager, "a")) == 80
        manager.check_integrity()
    manager.free("a")
    assert manager.num_free == 80
    manager.check_integrity()


def test_second_step_is_planned_before_the_first_is_committed() -> None:
    """Look-ahead covers both: the rows of the step in flight survive the commit before it."""
    manager = BlockManager(64, 4, lookahead=5)
    tokens = list(range(6))
    manager.add("a", tokens)
    grow(manager, "a", tokens)
    manager.reserve({"a": 5})
    for accepted in (4, 0, 2, 4, 4, 0):
        manager.reserve({"a": 10})  # the next step too, if all are accepted
        in_flight = list(manager.block_ids("a"))
        tokens = [*tokens, *range(100, 101 + accepted)]
        manager.commit("a", len(tokens), tokens)
        last_row = len(tokens) + 5 - 1
        assert list(manager.block_ids("a"))[: last_row // 4 + 1] == in_flight[: last_row // 4 + 1]
        manager.check_integrity()


def test_a_cancelled_step_gives_its_pages_back() -> None:
    manager = cached(4, list(range(6)))
    free = manager.num_free
    manager.reserve({"a": 9})
    manager.roll_back("a", 6)
    assert (manager.owned("a"), manager.num_free) == (2, free)
    manager.reserve({"a": 9})
    manager.commit("a", 6, list(range(7)))
    assert (manager.owned("a"), manager.num_free) == (2, free)


def test_roll_back_to_every_length() -> None:
    for page_size in (1, 3, 4):
        for length in range(11):
            manager = cached(page_size, list(range(10)))
            manager.roll_back("a", length)
            assert manager.length("a") == length
            assert manager.owned("a") == ceil(length, page_size)
            manager.check_integrity()
            grow(manager, "a", [*range(length), *range(50, 60)])


def test_context_limit_is_met_without_touching_page_zero() -> None:
    """BL-39: limit 80 = 5 pages of 16, 78 tokens held, k = 4: two rows have slots, three none."""
    limit, page = 80, 16
    manager = BlockManager(7, page)
    cache = LatentCache(1, 7, page, 8, torch.float32, "cpu")
    manager.add("other", [0] * 5)
    grow(manager, "other", [0] * 5)  # page 0 is someone's
    tokens = list(range(78))
    manager.add("a", tokens)
    grow(manager, "a", tokens)
    cache.layer(0).fill_(1.0)
    wanted = range(78, 78 + 5)
    manager.reserve({"a": min(len(wanted), limit - 78)})
    blocks = manager.block_ids("a")
    assert len(blocks) == 5
    slots = [blocks[p // page] * page + p % page if p < limit else -1 for p in wanted]
    assert slots[2:] == [-1, -1, -1]
    cache.store(0, torch.full((5, 6), 2.0), torch.full((5, 2), 2.0), torch.tensor(slots))
    assert bool((cache.layer(0)[0] == 1.0).all())
    assert int((cache.layer(0) == 2.0).sum()) == 2 * 8
    with pytest.raises(ArgumentError, match="length is 81"):
        manager.commit("a", 81, list(range(81)))
    manager.commit("a", 80, list(range(80)))
    assert (manager.length("a"), manager.owned("a")) == (80, 5)
