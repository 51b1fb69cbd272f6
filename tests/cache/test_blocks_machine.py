"""A state machine over BlockManager with a model of the pool's memory.

The model keeps what every row of every page holds: all tokens up to it, since a latent row depends
on its whole prefix. After each step: the manager's own integrity check, every request reads back
its rows, and every published page holds what it is published as. At each write: the page has one
owner and can't be found by anybody. With `prompts_only` no published row is a verify's.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specmla.cache import BlockManager
from specmla.errors import PoolFullError

TOKENS = st.integers(0, 1)  # two tokens only: prefixes meet all the time
DRAFTS = st.lists(TOKENS, max_size=6)
Row = tuple[int, ...]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names = itertools.count()
        self.tokens: dict[int, list[int]] = {}  # committed tokens of each request

    @initialize(
        num_pages=st.integers(1, 14),
        page_size=st.integers(1, 5),
        lookahead=st.sampled_from([0, 0, 1, 4]),
        caching=st.sampled_from([True, True, True, False]),
        alone=st.booleans(),
    )
    def build(
        self, num_pages: int, page_size: int, lookahead: int, caching: bool, alone: bool
    ) -> None:
        self.manager = BlockManager(
            num_pages, page_size, lookahead=lookahead, prefix_caching=caching, prompts_only=alone
        )
        self.page_size, self.lookahead = page_size, lookahead
        self.by_verifies: set[tuple[int, int]] = set()  # page and place of their rows
        self.memory: list[list[Row]] = [[()] * page_size for _ in range(num_pages)]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def snapshot(self) -> object:
        manager = self.manager
        blocks = {r: list(manager.block_ids(r)) for r in self.tokens}
        return blocks, {r: manager.length(r) for r in self.tokens}, manager.num_free

    def pages_needed(self, needs: dict[int, int]) -> int:
        """Pages that a batch takes: growth, and a copy of each tail for all but its last owner."""
        total, writers = 0, []
        for request, rows in needs.items():
            length, blocks = len(self.tokens[request]), self.manager.block_ids(request)
            end = length + rows + self.lookahead
            total += max(0, -(-end // self.page_size) - len(blocks))
            if end > length and length % self.page_size:
                writers.append(blocks[length // self.page_size])
        for page in set(writers):
            total += min(writers.count(page), self.owners().count(page) - 1)
        return total

    def reserve(self, needs: dict[int, int]) -> bool:
        """Reserve and do the copies; or see that a refusal was due and changed nothing."""
        needed, free, before = self.pages_needed(needs), self.manager.num_free, self.snapshot()
        if needed > free:
            with pytest.raises(PoolFullError, match=f"needs {needed} pages, the pool has {free} "):
                self.manager.reserve(needs)
            assert self.snapshot() == before
            return False
        copies = self.manager.reserve(needs)
        assert self.manager.num_free == free - needed
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not {source for source, _ in copies} & set(targets)
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
            for place in range(self.page_size):
                self.mark(target, place, (source, place) in self.by_verifies)
        for request, rows in needs.items():
            end = len(self.tokens[request]) + rows + self.lookahead
            assert self.manager.owned(request) * self.page_size >= end
        return True

    def mark(self, page: int, place: int, by_verify: bool) -> None:
        (self.by_verifies.add if by_verify else self.by_verifies.discard)((page, place))

    def write(self, request: int, tokens: list[int], *, is_prompt: bool = False) -> None:
        """Write rows after the request's length; no written page is shared or can be found."""
        blocks, owners = self.manager.block_ids(request), self.owners()
        sequence = (*self.tokens[request], *tokens)
        for row in range(len(self.tokens[request]), len(sequence)):
            page = blocks[row // self.page_size]
            assert owners.count(page) == 1, "a shared page was written"
            assert page not in self.manager._index, "a published page was written"
            self.memory[page][row % self.page_size] = sequence[: row + 1]
            self.mark(page, row % self.page_size, not is_prompt)

    def owners(self) -> list[int]:
        return [page for r in self.tokens for page in self.manager.block_ids(r)]

    def commit(self, request: int, new: list[int], anchor: int, *, is_prompt: bool = False) -> None:
        tokens = self.tokens[request] = self.tokens[request] + new
        self.manager.commit(request, len(tokens), [*tokens, anchor], is_prompt=is_prompt)
        expected = -(-(len(tokens) + self.lookahead) // self.page_size)
        assert self.manager.owned(request) <= expected

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=24), data=st.data())
    def add_and_prefill(self, prompt: list[int], data: st.DataObject) -> None:
        request = next(self.names)
        matched = self.manager.add(request, prompt)
        assert matched < len(prompt) - self.manager.prompts_only or not matched
        assert matched % self.page_size == 0
        self.tokens[request] = prompt[:matched]
        self.check_rows(request)  # before anything is written: the shared pages hold the prefix
        stop = data.draw(st.integers(matched, len(prompt)))  # a chunk of the prompt, or none
        if self.reserve({request: stop - matched}):
            self.write(request, prompt[matched:stop], is_prompt=True)
            self.commit(request, prompt[matched:stop], 0, is_prompt=True)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def draft_and_verify(self, data: st.DataObject) -> None:
        """Some requests draft; each accepts any number of its rows, other tokens take no place."""
        batch = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1))
        rows = {r: [data.draw(TOKENS), *data.draw(DRAFTS)] for r in batch}
        if not self.reserve({r: len(rows[r]) for r in batch}):
            return
        for r in batch:
            self.write(r, rows[r])
        for r in batch:
            accepted = data.draw(st.integers(0, len(rows[r])))
            self.commit(r, rows[r][:accepted], data.draw(TOKENS))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def cancel_a_step(self, data: st.DataObject) -> None:
        """Drafts were written, then the step was given up."""
        request, drafts = self.pick(data), data.draw(DRAFTS)
        if self.reserve({request: len(drafts)}):
            self.write(request, drafts)
            self.manager.roll_back(request, len(self.tokens[request]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        request = self.pick(data)
        length = data.draw(st.integers(0, len(self.tokens[request])))
        self.manager.roll_back(request, length)
        self.tokens[request] = self.tokens[request][:length]
        assert self.manager.owned(request) == -(-length // self.page_size)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.pick(data), next(self.names)
        free = self.manager.num_free
        self.manager.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
        assert self.manager.num_free == free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.manager.free(request)
        del self.tokens[request]

    @rule(tokens=st.lists(TOKENS, max_size=24))
    def look_up(self, tokens: list[int]) -> None:
        free = self.manager.num_free
        matched = self.manager.match(tokens)
        assert matched <= len(tokens)
        assert matched % self.page_size == 0
        assert self.manager.num_free == free

    def check_rows(self, request: int) -> None:
        blocks = self.manager.block_ids(request)
        size = self.page_size
        tokens = self.tokens[request]
        for i in range(len(tokens)):
            assert self.memory[blocks[i // size]][i % size] == tuple(tokens[: i + 1])

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for request, tokens in self.tokens.items():
            assert self.manager.length(request) == len(tokens)
            self.check_rows(request)
        assert self.manager.num_free + len(set(self.owners())) == self.manager.num_pages
        for page in self.manager._index.pages():
            content = memoryview(self.manager._index[page].content).cast("q").tolist()
            assert [row[-1] for row in self.memory[page]] == content
            if self.manager.prompts_only:
                assert not {page} & {held for held, _ in self.by_verifies}

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.tokens:
            self.manager.free(request)
        self.tokens = {}
        assert self.manager.num_free == self.manager.num_pages
        self.manager.check_integrity()


TestBlockManager = Machine.TestCase
TestBlockManager.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
