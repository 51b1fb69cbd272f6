"""Drafters on hidden states by captured graphs: right whatever was accepted, nothing read back."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafters import DSparkDrafter
from specmla import Bucket, SamplingParams
from specmla.verify import draft_graphs
from specmla.verify.draft_graphs import DraftGraphs
from tests.drafters import test_eagle3, test_neural
from tests.drafters.guards import guarded as guarded
from tests.drafters.kinds import maker
from tests.drafters.networks import tiny_block, tiny_target
from tests.drafters.test_captured_drafts import loop
from tests.e2e.conftest import make_step, prompts, run

KINDS = ("mtp", "eagle3", "dflash", "dspark")
BUCKETS = [Bucket(6, 5), Bucket(2, 5)]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make(target, kind: str, **step_options):
    """A capturing drafter whose proposals are compared with logits recomputed from nothing."""
    if kind != "eagle3":
        drafter, step, logits = test_neural.make(target, kind, **step_options)
        firsts: dict = {}
        checked = test_neural.check(drafter, logits, lambda name: firsts.get(name, 0))
        return drafter, step, checked, firsts
    drafter, checked, firsts = test_eagle3.make(target)
    return drafter, make_step(target, 4, num_pages=400, **step_options), checked, firsts


@pytest.fixture
def replays(monkeypatch):
    """Count the replays of drafts."""
    counts, real = [], DraftGraphs.run

    def counted(self, *args):
        counts.append(args)
        return real(self, *args)

    monkeypatch.setattr(DraftGraphs, "run", counted)
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_right_after_any_history_of_acceptances(target, kind, replays):
    batch = prompts(6)
    plain, _ = run(target, batch)
    whole = {name: [*given, *plain[name]] for name, (given, _) in batch.items()}
    drafter, step, checked, _ = make(target, kind)
    drafter.capture(BUCKETS, [SamplingParams()])
    oracle = test_neural.Oracle(drafter, whole, lambda n, at: Random(f"{n}{at}").randrange(5))
    tokens, history = run(
        target, batch, oracle, {f"r{i}": (4, 4, 3, 4, 1, 4)[i] for i in range(6)}, step
    )
    assert tokens == plain
    accepted = {(r.num_drafts, r.num_accepted) for results in history for r in results}
    assert {(4, n) for n in range(5)} | {(1, 0), (1, 1)} <= accepted
    assert checked[0] > 120
    assert len(replays) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_drafts_report_what_they_were_drawn_from(target, kind, replays):
    drafter, step, checked, _ = make(target, kind)
    drafter.capture(BUCKETS, [SamplingParams(0.5)])
    run(target, prompts(4, temperature=0.8), drafter, 4, step)
    assert checked[1] > 100
    assert replays


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_shared_prefix_are_not_read(target, kind, replays):
    """The second batch shares full pages with the first; its run begins behind them."""
    drafter, step, checked, firsts = make(target, kind)
    drafter.capture(BUCKETS, [SamplingParams()])
    shared = [5, 9, 2, 7, 1, 1, 8, 3, 3, 20, 4]
    run(target, {"a": ([*shared, 30, 31], SamplingParams(max_tokens=9))}, drafter, 3, step)
    batch = {n: ([*shared, i], SamplingParams(max_tokens=12)) for i, n in enumerate(("b", "c"))}
    plain, _ = run(target, batch)
    firsts |= {"b": 8, "c": 8}
    tokens, _ = run(target, batch, drafter, 3, step)
    assert tokens == plain
    assert checked[0] > 20
    assert len(replays) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_drafts_in_between(target, kind, replays):
    drafter, step, checked, _ = make(target, kind)
    drafter.capture(BUCKETS, [SamplingParams()])
    turn, inner = iter(range(10_000)), drafter.propose
    drafter.propose = lambda requests: inner([r for r in requests if next(turn) % 3 == 0])
    plain, _ = run(target, prompts(6))
    tokens, _ = run(target, prompts(6), drafter, 4, step)
    assert tokens == plain
    assert checked[0] > 100
    assert replays


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_proposes_as_host_driven_rounds_do(target, kind, temperature, replays):
    runs = []
    for graphs in (False, True):
        drafter, step, _, _ = make(target, kind)
        batch = prompts(4, 16, temperature=temperature)
        runs.append(loop(target, batch, drafter, graphs=graphs, step=step))
    assert len(replays) > 3
    assert runs[0][0] == runs[1][0]
    for plain, ours in zip(runs[0][1], runs[1][1], strict=True):
        assert ours[:3] == plain[:3]
        if plain[3] is not None:
            torch.testing.assert_close(ours[3], plain[3], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_reads_nothing_back(target, kind, guarded):
    drafter, step, _, _ = make(target, kind)
    loop(target, prompts(3, temperature=1.0), drafter, graphs=True, step=step)
    assert len(guarded) > 5


class Operators(TorchDispatchMode):
    """Counts the operators that run, those of a graph apart."""

    count = 0
    is_replay = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Operators.count += not Operators.is_replay
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_operators_around_a_replay_do_not_grow_with_the_batch(kind, monkeypatch):
    """On a GPU each is a launch: one for each request would take longer than a small network."""

    def record(call, device, pool=None):
        def replay():
            Operators.is_replay = True
            try:
                return call()
            finally:
                Operators.is_replay = False

        return replay

    monkeypatch.setattr(draft_graphs, "record", record)
    target, counts = tiny_target().double(), []
    for size in (2, 6):
        step = make_step(target, 4, num_pages=400, num_draft_layers=1)
        drafter = maker(target, kind, 400)(step)
        drafter.capture([Bucket(size, 5)], [SamplingParams()])
        real, seen = drafter.propose, []

        def propose(requests, real=real, seen=seen, size=size):
            before = Operators.count
            with Operators():
                proposal = real(requests)
            if len(proposal.counts) == size and min(proposal.counts) > 0:
                seen.append(Operators.count - before)
            return proposal

        drafter.propose = propose
        run(target, prompts(size, 12), drafter, 4, step)
        counts.append(min(seen))  # the first one may have more to catch up with
    assert counts[0] == counts[1] > 3


def test_dspark_ends_its_blocks_where_it_would_without_graphs(target, replays):
    """By its confidences, which are those of the replay and not of what was captured last."""
    found = []
    for graphs in (False, True):
        drafter, step, _ = test_neural.make(target, "dspark")
        drafter.min_confidence, seen, real = 0.3, [], drafter.propose

        def propose(requests, real=real, drafter=drafter, seen=seen):
            proposal = real(requests)
            if proposal.tokens.shape[1]:
                wanted = sum(count > 0 for count in proposal.counts)
                seen.append((proposal.tokens[:wanted], drafter.confidences))
            return proposal

        drafter.propose = propose
        if graphs:
            drafter.capture([Bucket(4, 9), Bucket(1, 5)], [SamplingParams()])
        run(target, prompts(4), drafter, 4, step)
        found.append(seen)
    assert replays
    assert len(found[0]) == len(found[1])
    ended = 0
    for (tokens, confidences), (mine, own) in zip(*found, strict=True):
        assert torch.equal(tokens, mine)
        ended += int((tokens == -1).any())
        known = confidences > 0  # a row past its request's count is 0, or anything
        torch.testing.assert_close(own[known], confidences[known], atol=1e-5, rtol=1e-3)
    assert ended > 2


def test_dspark_without_confidences(target, replays):
    """A head that only ends blocks may be missing; the replay then leaves nothing beside drafts."""
    found = []
    for graphs in (False, True):
        draft = tiny_block(target, "dspark", confidence_head=False)
        step = make_step(target, 4, num_pages=400)
        drafter = DSparkDrafter(target, draft, num_pages=300, page_size=5, backend="reference")
        if graphs:
            drafter.capture([Bucket(4, 9), Bucket(1, 5)], [SamplingParams()])
        found.append(run(target, prompts(4), drafter, 4, step))
        assert drafter.confidences is None
    assert replays
    assert found[0] == found[1]
