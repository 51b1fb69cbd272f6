"""Overlapped stepping with random latencies, joins, aborts and preemptions; the plain loop beside.

Every request must come out token for token as `VerifyStep` alone gives it. The verdict's copy is
garbage until the host waits for it, and the host chooses at random when it does.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

import pytest
import torch

from specmla import (
    DraftProposal,
    DraftsAhead,
    NumericsError,
    OverlappedStep,
    SamplingParams,
    Stream,
    uniforms,
)
from tests.e2e.conftest import VOCAB, make_step
from tests.e2e.conftest import model as model

K, COUNT, LENGTH = 3, 7, 160


class Arrival:
    """Stands for the event of a copy: until somebody waits, the host's side is garbage."""

    def __init__(self, host: torch.Tensor) -> None:
        self.real, self.seen = host.clone(), host.fill_(-(2**40))

    def synchronize(self) -> None:
        self.seen.copy_(self.real)


class Case(NamedTuple):
    """A batch: prompts, parameters, and the draft [COUNT, LENGTH] of each request and position."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    script: torch.Tensor
    kind: str


def draft(case: Case, rows, positions, params) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft K tokens after anchors at `positions`, as a function of the position alone."""
    place = positions[:, None] + 1 + torch.arange(K)
    tokens = case.script[rows[:, None], place.clamp(max=LENGTH - 1)]
    if case.kind != "drawn":
        return tokens, None
    q = torch.full((*tokens.shape, VOCAB), 0.4 / VOCAB, dtype=torch.float64)
    q.scatter_add_(2, tokens[..., None], torch.full_like(q[..., :1], 0.6))
    seeds = torch.tensor([p.seed for p in params])
    u = uniforms(seeds, positions, torch.arange(K), Stream.DRAFT)
    drawn = (q.cumsum(-1) < u[..., None]).sum(-1).clamp(max=VOCAB - 1)
    return drawn, q


def forward(model, step, plan) -> torch.Tensor:
    hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
    return model.logits(hidden[plan.logit_rows])


def alone(model, case: Case, rule: str) -> list[list[int]]:
    """All tokens of each request, one after another through `VerifyStep`."""
    out = []
    for i, prompt in enumerate(case.prompts):
        step = make_step(model, num_pages=60, rule=rule, prefix_caching=False)
        step.add(i, prompt, case.sampling[i])
        tokens = list(prompt)
        while step.active:
            proposal = None
            if case.kind != "none" and (wanted := step.draft_requests(K)):
                at = torch.tensor([len(wanted[0].tokens) - 1])
                drafts, q = draft(case, torch.tensor([i]), at, [case.sampling[i]])
                count = wanted[0].num_drafts
                q = None if q is None else q[:, :count]
                proposal = DraftProposal((i,), (count,), drafts[:, :count], q)
            plan = step.plan(proposal)
            tokens += step.commit(plan, step.verify(plan, forward(model, step, plan)))[0].new_tokens
        out.append(tokens)
    return out


EXTRAS: list[dict[str, Any]] = [
    {"frequency_penalty": 3.0, "logit_bias": ((11, 40.0), (12, 39.0), (13, 38.0))},
    {"repetition_penalty": 5.0},
    {"presence_penalty": 4.0, "frequency_penalty": 2.0, "repetition_penalty": 0.8},
    {},
    {"banned_token_ids": tuple(range(9)), "logit_bias": ((11, 3.0), (12, -2.0))},
    {"min_tokens": 12, "frequency_penalty": 6.0},
]
"""What requests ask for by turns, in histories with processors."""


def make_case(
    model, seed: int, kind: str, temperature: float, rule: str, extras: bool = False
) -> Case:
    """Prompts that share prefixes; the script is what plain decoding gives, spoilt here and there.

    Some requests end by a stop token in their middle, some at the context limit.
    """
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(9)]
    prompts = [
        common[: rng.choice([0, 6, 9])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        for _ in range(COUNT)
    ]
    sampling = [
        SamplingParams(
            temperature if i != 1 else 0.0,
            top_p=0.9 if temperature else 1.0,
            seed=seed * 10 + i,
            max_tokens=rng.randint(1, 26),
            **EXTRAS[i % len(EXTRAS)] if extras else {},
        )
        for i in range(COUNT)
    ]
    script = torch.zeros(COUNT, LENGTH, dtype=torch.int64)
    case = Case(prompts, sampling, script, "none")
    for i, tokens in enumerate(alone(model, case, rule)):
        script[i, : len(tokens)] = torch.tensor(tokens)
        for at in range(len(tokens)):
            if rng.random() < 0.25:
                script[i, at] = rng.randrange(VOCAB)
        if rng.random() < 0.4:
            stop = tokens[rng.randrange(len(prompts[i]), len(tokens))]
            sampling[i] = dataclasses.replace(sampling[i], stop_token_ids=(stop,))
    return case._replace(kind=kind)


class History:
    """Drives one `OverlappedStep` at random; `check` holds after everything that it does."""

    def __init__(self, model, case: Case, rule: str, rng: random.Random, preempts: bool) -> None:
        self.model, self.case, self.rng, self.preempts = model, case, rng, preempts
        self.step = make_step(model, num_pages=120, rule=rule)
        self.overlap = OverlappedStep(self.step)
        self.waiting = list(range(COUNT))
        self.tokens: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.ran_ahead = self.flagged = self.accepted = 0

    def run(self) -> None:
        while self.waiting or self.step.active or self.overlap.num_flying:
            self.join_or_leave()
            if self.overlap.num_flying and self.rng.random() < 0.2:
                self.commit()
            if self.overlap.ready:
                self.advance()
            flying = self.overlap.num_flying
            if flying == 2 or (flying and not self.overlap.ready):
                self.commit()
        assert self.step.blocks.num_free == self.step.blocks.num_pages

    def join_or_leave(self) -> None:
        draw = self.rng.random
        while self.waiting and (draw() < 0.5 or not self.step.active):
            name = self.waiting.pop(0)
            tokens = self.tokens.setdefault(name, list(self.case.prompts[name]))
            params = self.case.sampling[name]
            left = params.max_tokens - len(tokens) + len(self.case.prompts[name])
            self.step.add(name, tokens, dataclasses.replace(params, max_tokens=left))
        for name in self.step.active:
            if draw() < 0.02:
                self.overlap.remove(name)
                self.aborted.add(name)
            elif self.preempts and draw() < 0.05:
                self.overlap.remove(name)
                self.waiting.append(name)
        self.check()

    def advance(self) -> None:
        names = [n for n in self.overlap.ready if self.rng.random() < 0.85]
        if not names:
            return
        self.ran_ahead += self.overlap.num_flying
        plan = self.overlap.plan(self.drafts(names), names)
        self.check()
        if self.rng.random() < 0.1:
            self.overlap.cancel(plan)
            self.check()
            return
        if self.overlap.num_flying and self.rng.random() < 0.3 and not self.commit():
            return
        kept = self.shared_pages()
        before = [self.rows(i)[kept] for i in range(2)]
        logits = forward(self.model, self.step, plan)
        for i in range(2):
            assert torch.equal(self.rows(i)[kept], before[i]), "a shared page was written"
        if self.rng.random() < 0.04:
            logits[self.rng.randrange(len(logits))] = float("nan")
        self.overlap.verify(plan, logits)
        flight = self.overlap._flights.flying[-1]
        late = dataclasses.replace(flight.verdict, event=Arrival(flight.verdict.host))
        flight.verdict = late
        self.check()

    def commit(self) -> bool:
        before = {n: list(self.step.tokens(n)) for n in self.step.active}
        try:
            results = self.overlap.commit()
        except NumericsError:
            self.flagged += 1
            assert before == {n: list(self.step.tokens(n)) for n in self.step.active}
            assert self.overlap.num_flying == 0
            for name in self.step.active:
                self.assert_owned(name, 0)
            self.check()
            return False
        for r in results:
            self.tokens[r.request_id] += r.new_tokens
            assert r.num_drafts <= K
            self.accepted += r.num_accepted
        self.check()
        return True

    def drafts(self, names: list[int]):
        case, overlap = self.case, self.overlap
        if case.kind == "none":
            return None
        ahead = case.kind == "ahead"
        wanted = overlap.draft_requests(K, names, ahead=ahead)
        if not wanted:
            return None
        ids = tuple(r.request_id for r in wanted)
        counts = tuple(r.num_drafts for r in wanted)
        rows = torch.tensor(ids)
        if ahead:
            width = max(counts)
            place = torch.tensor([len(r.tokens) for r in wanted])[:, None] + torch.arange(width)
            drafts = case.script[rows[:, None], place.clamp(max=LENGTH - 1)]
            return DraftsAhead(DraftProposal(ids, counts, drafts), K)
        at = overlap.anchors(ids)
        drafts, q = draft(case, rows, at.positions, [case.sampling[i] for i in ids])
        return DraftProposal(ids, counts, drafts, q)

    def check(self) -> None:
        self.step.blocks.check_integrity()
        flights = self.overlap._flights.held
        for name in self.step.active:
            state = self.step._table[name]
            under_way = [f for f in flights if state in f.places]
            pending = (
                len(state.tokens)
                if any(f.plan.requests[f.places[state]].is_prompt for f in under_way)
                else 0
            )
            self.assert_owned(name, pending + len(under_way) * (K + 1))

    def assert_owned(self, name: int, reserve: int) -> None:
        blocks = self.step.blocks
        assert blocks.owned(name) <= -(-(blocks.length(name) + reserve) // blocks.page_size)

    def rows(self, layer: int) -> torch.Tensor:
        return self.step.cache.layer(layer).view(torch.int32)

    def shared_pages(self) -> list[int]:
        pool, index = self.step.blocks._pool, self.step.blocks._index
        return [p for p in range(pool.num_pages) if pool.refs[p] > 1 or p in index]


def drive(
    model, seed: int, kind: str, temperature: float, rule: str, preempts: bool, extras: bool = False
) -> History:
    case = make_case(model, seed, kind, temperature, rule, extras)
    history = History(model, case, rule, random.Random(seed + 1), preempts)
    history.run()
    for name, want in enumerate(alone(model, case, rule)):
        got = history.tokens[name]
        assert got == (want[: len(got)] if name in history.aborted else want), name
    return history


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", ["none", "device", "ahead"])
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_greedy_histories_give_the_tokens_of_the_plain_loop(model, kind, seed):
    drive(model, seed, kind, 0.0, "token_level", preempts=True)


@pytest.mark.parametrize("rule", ["token_level", "block"])
@pytest.mark.parametrize("kind", ["none", "device", "drawn", "ahead"])
def test_sampled_histories_give_the_tokens_of_the_plain_loop(model, kind, rule):
    drive(model, 11, kind, 0.9, rule, preempts=False)


@pytest.mark.parametrize("kind", ["device", "ahead"])
def test_preempted_samples_go_on_where_draws_are_keyed_by_position(model, kind):
    drive(model, 21, kind, 0.9, "sample_match", preempts=True)


@pytest.mark.parametrize("rule", ["token_level", "sample_match"])
@pytest.mark.parametrize("kind", ["none", "device", "drawn", "ahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_count_the_tokens_under_way(model, temperature, kind, rule):
    """Bans, biases and held back stops too: each row by its own history, part of it on its way."""
    if kind == "drawn" and rule == "sample_match":
        pytest.skip("drafts that are drawn have no part in it")
    history = drive(model, 31, kind, temperature, rule, preempts=False, extras=True)
    assert history.ran_ahead > 5


def test_the_histories_hold_what_they_are_for(model):
    histories = [drive(model, seed, "device", 0.0, "token_level", preempts=True) for seed in (1, 2)]
    assert sum(h.ran_ahead for h in histories) > 20
    assert sum(h.accepted for h in histories) > 20
    assert sum(h.flagged for h in histories) > 0
    assert any(h.aborted for h in histories)
