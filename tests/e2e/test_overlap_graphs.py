"""Overlapped steps in captured buckets: random histories give the tokens of the plain loop.

On a CPU a replay calls the captured function again; with real graphs the loop is run in
tests/gpu/test_graphs_trees_gpu.py.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from drafters import NgramDrafter, SuffixDrafter
from specmla import (
    ArgumentError,
    CapturedOverlap,
    DraftProposal,
    OverlappedStep,
    SamplingParams,
    generate,
)
from specmla.bucket import Bucket
from tests.drafters.guards import guard_records
from tests.e2e.conftest import VOCAB, make_step, prompts, run
from tests.e2e.conftest import model as model
from tests.e2e.test_overlap_histories import COUNT, Arrival, History, K, alone, forward, make_case


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class GraphHistory(History):
    """Drives a `CapturedOverlap`: buckets that hold every batch, or only some, and NaN at times."""

    def __init__(self, model, case, rule, rng, preempts, buckets) -> None:
        super().__init__(model, case, rule, rng, preempts)
        self.spoilt = self.replays = self.processed = 0

        def run_model(plan):
            logits = forward(model, self.step, plan)
            if self.spoilt:
                logits[rng.randrange(len(logits))] = float("nan")
                self.spoilt = 0
            return logits

        self.graphs = CapturedOverlap(
            self.overlap, run_model, buckets, sampling=case.sampling, eager=True
        )

    def advance(self) -> None:
        names = [n for n in self.overlap.ready if self.rng.random() < 0.85]
        if not names:
            return
        self.ran_ahead += self.overlap.num_flying
        plan = self.graphs.plan(self.drafts(names), names)
        self.check()
        if self.rng.random() < 0.1:
            self.overlap.cancel(plan)
            self.check()
            return
        if self.overlap.num_flying and self.rng.random() < 0.3 and not self.commit():
            return
        kept = self.shared_pages()
        before = [self.rows(i)[kept] for i in range(2)]
        self.spoilt = self.rng.random() < 0.03
        open_plan = self.graphs._open
        is_replay = open_plan is not None and open_plan.plan is plan
        self.replays += is_replay
        self.processed += is_replay and plan.sampling.has_processors
        self.graphs.verify(plan)
        for i in range(2):
            assert torch.equal(self.rows(i)[kept], before[i]), "a shared page was written"
        flight = self.overlap._flights.flying[-1]
        flight.verdict = dataclasses.replace(
            flight.verdict, host=flight.verdict.host.clone(), event=None
        )
        flight.verdict = dataclasses.replace(flight.verdict, event=Arrival(flight.verdict.host))
        self.check()


def drive(model, seed, kind, temperature, rule, preempts, buckets, extras=False) -> GraphHistory:
    case = make_case(model, seed, kind, temperature, rule, extras)
    history = GraphHistory(model, case, rule, random.Random(seed + 1), preempts, buckets)
    history.run()
    for name, want in enumerate(alone(model, case, rule)):
        got = history.tokens[name]
        assert got == (want[: len(got)] if name in history.aborted else want), name
    assert history.replays or kind == "drawn"
    return history


ALL = [Bucket(COUNT, 1 + K)]
SOME = [Bucket(2, 1 + K), Bucket(COUNT, 1)]


@pytest.mark.parametrize("buckets", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["none", "device", "ahead"])
def test_greedy_histories_give_the_tokens_of_the_plain_loop(model, kind, buckets):
    for seed in (1, 2):
        drive(model, seed, kind, 0.0, "token_level", True, buckets)


@pytest.mark.parametrize(
    ("kind", "rule"), [("none", "token_level"), ("device", "block"), ("ahead", "token_level"),
                       ("drawn", "token_level")]
)  # fmt: skip
def test_sampled_histories_give_the_tokens_of_the_plain_loop(model, kind, rule):
    """Drafts with distributions run without a graph, in the same history."""
    drive(model, 11, kind, 0.9, rule, False, ALL)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("kind", "buckets"), [("none", SOME), ("device", ALL), ("ahead", SOME)])
def test_penalties_count_the_tokens_under_way(model, kind, buckets, temperature):
    """Bans, biases and held back stops too; in replays, beside steps without a graph."""
    history = drive(model, 31, kind, temperature, "token_level", False, buckets, extras=True)
    assert history.processed > 5


def test_preempted_samples_go_on_where_draws_are_keyed_by_position(model):
    drive(model, 21, "ahead", 0.9, "sample_match", True, ALL)


DRAFTERS = {
    "plain": lambda: None,
    "ngram": lambda: NgramDrafter(VOCAB, prompt_lookup_min=1),
    "suffix": lambda: SuffixDrafter(VOCAB, min_token_prob=0.01, max_spec_offset=4),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_loop_gives_the_tokens_of_the_plain_one(model, drafter):
    batch = {i: ([*range(9), *range(i, 8)], SamplingParams(max_tokens=50)) for i in range(4)}
    batch |= prompts(2)
    plain = run(model, batch)[0]
    step = make_step(model)
    tokens: dict = {name: [] for name in batch}
    accepted = 0
    for results in generate(model, step, batch, DRAFTERS[drafter](), 4, graphs=True, overlap=True):
        step.blocks.check_integrity()
        for r in results:
            tokens[r.request_id] += r.new_tokens
            accepted += r.num_accepted
    assert tokens == plain
    assert drafter == "plain" or accepted > 4
    assert step.blocks.num_free == step.blocks.num_pages


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_captured_and_eager_steps_accept_the_same(model, drafter):
    """Sampled ones too: the drafts are the same, and so are the random numbers."""
    batch = prompts(5, 40, temperature=0.5)
    found = []
    for graphs in (False, True):
        step, made = make_step(model), DRAFTERS[drafter]()
        steps = generate(model, step, batch, made, 3, graphs=graphs, overlap=True)
        found.append(list(steps))
    assert found[0] == found[1]


def test_penalties_beyond_what_was_captured_are_refused(model):
    step = make_step(model)
    overlap, params = OverlappedStep(step), SamplingParams(max_tokens=9, frequency_penalty=1.0)

    def run_model(plan):
        return forward(model, step, plan)

    step.add(0, list(range(6)), params)
    overlap.verify(plan := overlap.plan(), run_model(plan))
    overlap.commit()
    plain = CapturedOverlap(overlap, run_model, [Bucket(1, 2)])
    with pytest.raises(ArgumentError, match="has_processors=True"):
        plain.plan()
    short = CapturedOverlap(overlap, run_model, [Bucket(1, 2)], sampling=[params], history=6)
    with pytest.raises(ArgumentError, match=r"penalties count 7 .*captured are 6 \(history\)"):
        short.plan()
    with pytest.raises(ArgumentError, match="history is 0"):
        CapturedOverlap(overlap, run_model, [Bucket(1, 2)], history=0)
    wide = overlap.plan(DraftProposal((0,), (3,), torch.tensor([[1, 2, 3]])))
    overlap.verify(wide, run_model(wide))
    graphs = CapturedOverlap(overlap, run_model, [Bucket(1, 2)], sampling=[params])
    with pytest.raises(ArgumentError, match="may emit 4 tokens, captured are 2"):
        graphs.plan()
    overlap.commit()
    graphs.verify(graphs.plan())
    assert len(overlap.commit()) == 1


def test_what_was_not_captured_is_refused_by_name(model):
    step = make_step(model)
    overlap = OverlappedStep(step)
    graphs = CapturedOverlap(overlap, lambda plan: forward(model, step, plan), [Bucket(1, 2)])
    for name in range(2):
        step.add(name, [3, 1, 4], SamplingParams(max_tokens=9))
    free = step.blocks.num_free
    with pytest.raises(ArgumentError, match=r"requests \[0, 1\] are prompts.*there are 2 requests"):
        graphs.plan()
    assert step.blocks.num_free == free
    plan = overlap.plan()
    with pytest.raises(ArgumentError, match="not the one that this object planned last"):
        graphs.verify(plan)
    overlap.verify(plan, forward(model, step, plan))
    with pytest.raises(ArgumentError, match="step under way has 2 requests, captured are 1"):
        graphs.plan(None, [0])
    overlap.commit()
    plan = graphs.plan(None, [0])
    graphs.verify(plan)
    with pytest.raises(ArgumentError, match="verified once"):
        graphs.verify(plan)
    assert len(overlap.commit()) == 1
    found = r"buckets have trees.*sampling is empty"
    with pytest.raises(ArgumentError, match=found):
        CapturedOverlap(overlap, graphs.forward, [Bucket(2, 3, trees=True)], sampling=[])


def test_the_histories_hold_what_they_are_for(model):
    made = [drive(model, seed, "device", 0.0, "token_level", True, ALL) for seed in (3, 4, 6)]
    assert sum(h.replays for h in made) > 25
    assert sum(h.ran_ahead for h in made) > 20
    assert sum(h.accepted for h in made) > 20
    assert sum(h.flagged for h in made) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_reads_nothing_back(model, temperature, monkeypatch):
    calls = guard_records(monkeypatch)
    batch = prompts(4, temperature=temperature)
    drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
    for _ in generate(model, make_step(model), batch, drafter, 3, graphs=True, overlap=True):
        pass
    assert len(calls) > 10
