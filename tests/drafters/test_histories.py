"""After any history a drafter's cache holds what a fresh prefill of the committed tokens gives.

Acceptances, stops, cancelled steps, preemptions, forks, prefixes found in the cache, pools that run
full: whatever happened, rows and proposals are those of a drafter that heard of the committed
tokens at once, and the target's shared pages keep their bits.
"""

from __future__ import annotations

import pydoc

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from drafters import DraftModelDrafter
from drafters.state_log import StateLog
from specmla import ArgumentError, Bucket, RequestRows, SamplingParams
from tests.drafters.histories import World
from tests.drafters.kinds import KINDS
from tests.drafters.networks import tiny_target


@pytest.fixture(scope="module")
def target():
    """A target in float64, so that what should be equal nearly is."""
    return tiny_target(layers=3).double()


ACTIONS = st.lists(
    st.sampled_from(["add", "add", "fork", "preempt", *["run"] * 8]), min_size=4, max_size=14
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**20), page_size=st.sampled_from([1, 3, 4]), actions=ACTIONS)
def test_rows_equal_a_fresh_prefill_after_any_history(target, kind, seed, page_size, actions):
    world = World(target, kind, seed, page_size, (90 // page_size, 40))
    world.add()
    for action in ("run", *actions):
        world.act(action)
    world.end()


@pytest.mark.parametrize("kind", KINDS)
def test_histories_do_what_they_are_for(target, kind):
    """Hits, forks, stops among drafts, evictions, full pools: all of it happens."""
    world = World(target, kind, 3, 4, (13, 12))
    wanted = {"hits", "forks", "preempted", "cancelled", "unheard", "rejected", "accepted"}
    wanted |= {"stop", "length", "cut", "draft pool full", "target pool full", "shared"}
    wanted |= {"evicted"}
    wanted |= {"behind a prefix"} if world.log(world.drafter) else set()
    wanted |= {"paths"} if kind in ("model_tree", "ddtree") else set()
    for turn in range(400):
        world.act({7: "fork", 13: "preempt"}.get(turn % 20, "add" if turn % 3 else "run"))
        world.act("run")
        if turn > 30 and all(world.seen[what] for what in wanted):
            break
    world.end()
    assert {what for what in wanted if not world.seen[what]} == set()
    assert world.seen["rows"] > 100


REPLAYS = {
    "draft_model": "drafters.draft_model.CapturedChains.run",
    "mtp": "drafters.mtp.drawn_proposal",
    "eagle3": "drafters.eagle3.drawn_proposal",
    "dflash": "drafters.block.drawn_proposal",
    "dspark": "drafters.block.drawn_proposal",
}
"""What is called, once a proposal, where one was drafted by a captured graph."""


@pytest.mark.parametrize("kind", REPLAYS)
def test_captured_drafts_leave_the_same_rows(target, kind, monkeypatch):
    """Graphs of fixed sizes, on a CPU the same buffers: catching up, renewed rows, restarts."""
    world, replays = World(target, kind, 4, 4, (22, 40)), []
    world.drafter.capture([Bucket(1, 2), Bucket(2, 4), Bucket(4, 9)], [SamplingParams(1.0)])
    real = pydoc.locate(REPLAYS[kind])
    monkeypatch.setattr(REPLAYS[kind], lambda *args: replays.append(args) or real(*args))
    for turn in range(40):
        world.act({7: "fork", 13: "preempt"}.get(turn % 20, "add" if turn % 3 else "run"))
        world.act("run")
    world.end()
    assert len(replays) > 10
    assert world.seen["cancelled"]
    assert world.seen["unheard"]


def live(target, kind: str) -> None:
    """Run a history that is long enough for anything wrong to be noticed."""
    world = World(target, kind, 3, 4, (13, 12))
    for turn in range(40):
        world.act("add" if turn % 3 else "run")
        world.act("run")


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("draft_model", "model_tree")])
def test_states_of_other_rows_are_noticed(target, kind, monkeypatch):
    real = StateLog.observe

    def shifted(self, results, hidden):
        return real(self, results, hidden._replace(states=hidden.states.roll(1, 0)))

    monkeypatch.setattr(StateLog, "observe", shifted)
    monkeypatch.setattr(World, "run_target", unpatched(World.run_target, monkeypatch, real))
    with pytest.raises(AssertionError):
        live(target, kind)


def unpatched(run, monkeypatch, real):
    """Let the truth be computed as it should be."""

    def wrapped(self, *args):
        wrong = StateLog.observe
        monkeypatch.setattr(StateLog, "observe", real)
        run(self, *args)
        monkeypatch.setattr(StateLog, "observe", wrong)

    return wrapped


def test_rows_of_rejected_drafts_are_noticed(target, monkeypatch):
    real = DraftModelDrafter.observe

    def keeps_all(self, results, hidden=None):
        real(self, [r._replace(num_accepted=r.num_drafts) for r in results], hidden)

    monkeypatch.setattr(DraftModelDrafter, "observe", keeps_all)
    with pytest.raises((AssertionError, ArgumentError)):
        live(target, "draft_model")


def test_paths_that_are_not_moved_are_noticed(target, monkeypatch):
    monkeypatch.setattr("specmla.cache.latent.LatentCache.move", lambda *args: None)
    with pytest.raises(AssertionError):
        live(target, "model_tree")


def test_rows_of_another_requests_prefix_are_noticed(target, monkeypatch):
    def everything(*args, window_start=0, **options):
        return RequestRows(*args, **options)

    monkeypatch.setattr("drafters.mtp.RequestRows", everything)
    with pytest.raises(AssertionError):
        live(target, "mtp")
