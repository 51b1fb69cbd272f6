"""Whatever was accepted, the cache holds what a fresh prefill of the committed tokens gives."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from specmla import (
    DeepseekForCausalLM,
    DraftProposal,
    DraftRequest,
    NumericsError,
    SamplingParams,
    VerifyStep,
)
from specmla.testing import relative_error
from tests.e2e.conftest import VOCAB, make_step

PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 11, 12]]  # prompts share pages


@pytest.fixture(scope="module")
def wide(model) -> DeepseekForCausalLM:
    """The model in float64: rows of any shape of step are equal to about 1e-14."""
    made = DeepseekForCausalLM(model.config)
    made.load_state_dict(model.state_dict())
    return made.double().eval()


class World:
    """A step over random requests, and the truth about every row and shared page."""

    def __init__(self, model: DeepseekForCausalLM, seed: int, page_size: int) -> None:
        self.model, self.rng = model, random.Random(seed)
        self.step = make_step(model, page_size, 400 // page_size)
        self.page_size, self.names = page_size, 0
        self.paths: list[tuple[int, ...]] = []
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self.num_shared = 0

    def add(self) -> None:
        prompt = self.rng.choice(PREFIXES) + self.tokens(self.rng.randint(1, 6))
        self.step.add(f"r{self.names}", prompt, SamplingParams(max_tokens=30))
        self.names += 1

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def fork(self) -> None:
        parent = self.rng.choice(self.step.active)
        self.step.fork(parent, f"r{self.names}", SamplingParams(max_tokens=30))
        self.names += 1

    def propose(self) -> DraftProposal | None:
        """Trees in any node order, chains and nothing."""
        rows, parents = [], []
        asked = self.step.draft_requests(9)
        if not asked or self.rng.random() < 0.1:
            return None
        for r in asked:
            row, tree = self.draft(r)
            rows.append(row)
            parents.append(tree)
        width = max(map(len, rows))
        padded = [row + [-1] * (width - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(rows), width)
        names = tuple(r.request_id for r in asked)
        return DraftProposal(names, tuple(map(len, rows)), tokens, parents=tuple(parents))

    def draft(self, r: DraftRequest) -> tuple[list[int], list[int] | None]:
        count = self.rng.randint(0, r.num_nodes)
        if self.rng.random() < 0.25:
            return self.tokens(min(count, r.num_drafts)), None
        grown = [self.rng.randrange(-1, node) for node in range(count)]
        order = self.rng.sample(range(count), count)
        parents = [0] * count
        for node, parent in enumerate(grown):
            parents[order[node]] = -1 if parent < 0 else order[parent]
        return self.tokens(count), parents

    def logits(self, plan) -> torch.Tensor:
        """Let each row favour one of its own children, or (now and then) something else."""
        out = torch.zeros(len(plan.logit_rows), VOCAB, dtype=torch.float64)
        for b, request in enumerate(plan.requests):
            k = request.num_drafts
            tree = request.tree.parents if request.tree else tuple(range(k))
            for row in range(k + 1):
                children = [node for node in range(k) if tree[node] == row]
                token = self.rng.randrange(VOCAB)
                if children and self.rng.random() < 0.85:
                    token = int(plan.drafts[b, self.rng.choice(children)])
                out[plan.row_table[b, row], token] = 9.0
        return out

    def page(self, page: int) -> torch.Tensor:
        """Copy the bits of a page in all layers."""
        layers = range(self.step.cache.num_layers)
        rows = [self.step.cache.layer(i)[page] for i in layers]
        return torch.stack(rows).view(torch.int64)

    def shared_pages(self) -> dict[int, torch.Tensor]:
        """Copy the pages that more than one request owns, or that a later one may match."""
        pool = self.step.blocks._pool
        pages = [p for p in range(pool.num_pages) if pool.refs[p] > 1 or p in pool.index]
        return {page: self.page(page) for page in pages}

    def run(self) -> None:
        before = self.shared_pages()
        plan = self.step.plan(self.propose())
        # What `plan` took out of the prefix cache is no longer shared; all else is as it was.
        shared = {page: bits for page, bits in before.items() if page in self.shared_pages()}
        with torch.no_grad():
            self.model(plan.token_ids, plan.metadata, self.step.cache, self.step.builder.backend)
        fate = self.rng.random()
        if fate < 0.08:
            self.step.cancel(plan)
        elif fate < 0.12:
            bad = torch.full((len(plan.logit_rows), VOCAB), torch.nan, dtype=torch.float64)
            verdict = self.step.verify(plan, bad)
            with pytest.raises(NumericsError):
                self.step.commit(plan, verdict)
        else:
            results = self.step.commit(plan, self.step.verify(plan, self.logits(plan)))
            self.paths += [r.path for r in results if r.path]
        for page, bits in shared.items():
            assert torch.equal(self.page(page), bits), page
        self.num_shared = max(self.num_shared, len(shared))

    def check(self) -> None:
        self.step.blocks.check_integrity()
        for name in self.step.active:
            length = self.step.blocks.length(name)
            if not length:
                continue
            tokens = tuple(self.step.tokens(name)[:length])
            slots = slots_of(self.step, name, length)
            for layer, truth in enumerate(self.fresh(tokens)):
                held = self.step.cache.gather(layer, slots)
                assert relative_error(held, truth) < 1e-10, (name, layer)

    def fresh(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Give the rows [L, n, A] of a prefill from nothing."""
        if tokens not in self.known:
            step = make_step(self.model, 16, 8, prefix_caching=False)
            step.add("x", [*tokens, 0], SamplingParams())
            plan = step.plan()
            with torch.no_grad():
                self.model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
            slots = slots_of(step, "x", len(tokens))
            rows = [step.cache.gather(i, slots) for i in range(step.cache.num_layers)]
            self.known[tokens] = torch.stack(rows)
        return self.known[tokens]


def slots_of(step: VerifyStep, name: str, count: int) -> torch.Tensor:
    pages, size = step.blocks.block_ids(name), step.blocks.page_size
    return torch.tensor([pages[i // size] * size + i % size for i in range(count)])


ACTIONS = st.lists(st.sampled_from(["add", "fork", "run", "run", "run", "run"]), max_size=14)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**20), page_size=st.sampled_from([1, 3, 4, 8]), actions=ACTIONS)
def test_the_cache_equals_a_fresh_prefill_after_any_history(wide, seed, page_size, actions) -> None:
    world = World(wide, seed, page_size)
    world.add()
    world.run()
    for action in actions:
        if action == "add" or not world.step.active:
            if len(world.step.active) < 4:
                world.add()
        elif action == "fork":
            if len(world.step.active) < 4:
                world.fork()
        else:
            world.run()
        world.check()
    world.step.drop(world.step.active)
    assert world.step.blocks.num_free == world.step.blocks.num_pages


def test_histories_do_what_they_are_for(wide) -> None:
    """Long paths, rows that cross, shared pages: all of it happens."""
    world = World(wide, 5, 4)
    for turn in range(30):
        if len(world.step.active) < 3:
            world.add()
        elif turn == 12:
            world.fork()
        world.run()
        world.check()
    crossed = sum(list(p) != sorted(p) for p in world.paths)
    assert max(map(len, world.paths)) >= 3
    assert crossed > 2
    assert world.num_shared > 4


def live(world: World, turns: int) -> None:
    """Run and check steps with a few requests."""
    for _ in range(turns):
        if len(world.step.active) < 3:
            world.add()
        world.run()
        world.check()


def test_a_path_that_is_not_moved_is_noticed(wide, monkeypatch) -> None:
    monkeypatch.setattr("specmla.verify.step.move_paths", lambda *args: None)
    with pytest.raises(AssertionError):
        live(World(wide, 5, 4), 20)


def test_a_move_into_a_shared_page_is_noticed(wide, monkeypatch) -> None:
    world = World(wide, 5, 4)
    move = world.step.cache.move

    def astray(sources: torch.Tensor, targets: torch.Tensor) -> None:
        shared = next(iter(world.shared_pages()), None)
        move(sources, targets)
        if shared is not None:
            move(sources[:1], torch.tensor([shared * 4 + 3]))

    monkeypatch.setattr(world.step.cache, "move", astray)
    monkeypatch.setattr(world, "check", lambda: None)  # the pages alone must show it
    with pytest.raises(AssertionError):
        live(world, 20)
