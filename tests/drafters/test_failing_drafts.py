"""A proposal that fails half-way costs nothing: what it took is there again, what it held is free.

Pages, rows or networks may fail at any call; the engine goes on without drafts, and asks again.
"""

from __future__ import annotations

import pytest

from specmla import Bucket, PoolFullError, SamplingParams
from tests.drafters.histories import World
from tests.drafters.kinds import KINDS, pool_of
from tests.drafters.networks import tiny_target
from tests.drafters.test_histories import REPLAYS


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=3).double()


class BrokenError(Exception):
    """What a device would raise."""


class FailingWorld(World):
    """Lets every fourth proposal fail at one of its first writes to the drafter's cache."""

    def propose(self):
        if self.rng.random() < 0.75:
            return super().propose()
        left, cache = [self.rng.randint(0, 4)], pool_of(self.drafter, self.step)[0]
        with pytest.MonkeyPatch.context() as patch:
            for name in ("store", "store_into", "copy_pages"):
                patch.setattr(cache, name, self.failing(getattr(cache, name), left))
            patch.setattr(self, "check", lambda *given: None)
            try:
                return super().propose()
            except BrokenError:
                self.seen["broken"] += 1
                self.check_pages()
                return None

    def failing(self, real, left: list[int]):
        def call(*given, **options):
            left[0] -= 1
            if left[0] < 0:
                raise BrokenError
            return real(*given, **options)

        return call

    def check_pages(self) -> None:
        """A drafter's own pages hold its rows alone."""
        blocks = pool_of(self.drafter, self.step)[1]
        blocks.check_integrity()
        for name in self.step.active if blocks is not self.step.blocks else ():
            if name in blocks:
                assert blocks.owned(name) == -(-blocks.length(name) // blocks.page_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_rows_are_right_after_failed_proposals(target, kind, captured):
    if captured and kind not in REPLAYS:
        pytest.skip("it captures nothing")
    world = FailingWorld(target, kind, 0, 4, (22, 40))
    if captured:
        world.drafter.capture([Bucket(1, 2), Bucket(2, 4), Bucket(4, 9)], [SamplingParams(1.0)])
    for turn in range(40):
        world.act({7: "fork", 13: "preempt"}.get(turn % 20, "add" if turn % 3 else "run"))
        world.act("run")
    world.end()
    assert world.seen["broken"] > 1
    assert world.seen["rows"] > 50


def test_rows_of_the_target_are_given_up_where_a_page_was_not_copied(target):
    """An MTP module's rows lie in the target's pages, of which it may be the first to need one."""
    world = World(target, "mtp", 0, 4, (30, 40))
    world.step.add("a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9))
    world.run()
    world.step.fork("a", "b", SamplingParams(max_tokens=9))
    length = world.step.blocks.length("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.step.cache, "copy_pages", broken)
        with pytest.raises(BrokenError):
            world.drafter.propose(world.step.draft_requests(2, ["a"]))
    assert world.step.blocks.length("a") == length - length % 4
    for _ in range(4):
        world.run()
    world.end()


def broken(*given):
    raise BrokenError


@pytest.mark.parametrize("kind", ["draft_model", "model_tree"])
def test_a_full_pool_after_a_cancelled_step_keeps_no_rows_of_it(target, kind):
    world = World(target, kind, 0, 4, (30, 5))
    world.step.add("a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9))
    world.run()
    asked = world.step.draft_requests(2)
    world.drafter.propose(asked)  # its step is cancelled
    world.step.add("b", list(range(1, 13)), SamplingParams(max_tokens=9))
    world.hear(world.step.commit(*decided(world, ["b"])), None, heard=True)
    with pytest.raises(PoolFullError):
        world.drafter.propose(world.step.draft_requests(2))
    results = world.step.commit(*decided(world, ["a"]))
    world.drafter.observe(results)
    world.drafter.blocks.check_integrity()
    assert world.drafter.blocks.length("a") == 0


def decided(world: World, names: list[str]):
    """Run the target over a step without drafts."""
    plan = world.step.plan(None, names)
    world.target(plan.token_ids, plan.metadata, world.step.cache, world.step.builder.backend)
    return plan, world.step.verify(plan, world.logits(plan))
