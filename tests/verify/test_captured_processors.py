"""Captured steps with penalties, biases, bans, held back stops and constraints."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specmla import ArgumentError, DraftProposal, SamplingParams, generate
from specmla.bucket import Bucket
from specmla.verify import captured as captured_module
from specmla.verify.captured import CapturedStep
from specmla.verify.captured_processors import ProcessorBuffers, ProcessorRoom, fill
from specmla.verify.processors.apply import apply_processors, chain_history
from specmla.verify.processors.tables import Biases, Penalties, ProcessorTables
from tests.e2e.conftest import VOCAB, make_step, prompts
from tests.e2e.conftest import model as model
from tests.verify.test_captured import forward_of, propose, refused
from tests.verify.test_captured_trees import propose as propose_trees

PLAIN = SamplingParams(max_tokens=60)
REPEATS = SamplingParams(max_tokens=60, repetition_penalty=1.7)
COUNTS = SamplingParams(
    0.9, seed=3, max_tokens=60, presence_penalty=0.8, frequency_penalty=0.7, logprobs="processed"
)
SHIFTS = SamplingParams(
    0.7, top_k=20, seed=4, max_tokens=60, banned_token_ids=(3, 4, 5), logit_bias=((6, 2.5), (7, -1))
)
HELD = SamplingParams(max_tokens=60, min_tokens=9, stop_token_ids=tuple(range(30)))
KINDS = {"plain": PLAIN, "repeats": REPEATS, "counts": COUNTS, "shifts": SHIFTS, "held": HELD}


class OddAfterEven:
    """Allows odd ids after even ones and the other way round, and at times nothing at all."""

    dead_ends = 0

    def __init__(self, last: int) -> None:
        self.last = last

    def masks(self, drafts: Sequence[int]) -> Tensor:
        rows, last = [], self.last
        for draft in [*drafts, None]:
            row = torch.arange(VOCAB) % 2 != last % 2
            if last % 3 == 2 and rows:
                row[:] = False
                OddAfterEven.dead_ends += 1
            rows.append(row)
            if draft is None or not row[draft]:
                break
            last = draft
        return torch.stack(rows)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token % 2 != self.last % 2
            self.last = token


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def started(model, kinds, bound=(), **options):
    """A step whose requests, one a kind, have their prompts behind them."""
    step = make_step(model, **options)
    for i, sampling in enumerate(kinds):
        prompt = [(7 * i + j) % VOCAB for j in range(3 + 6 * i)]
        step.add(i, prompt, sampling, OddAfterEven(prompt[-1]) if i in bound else None)
    plan = step.plan()
    step.commit(plan, step.verify(plan, forward_of(model, step)(plan)))
    return step


def likely(model, step, counts, seed: int) -> DraftProposal:
    """Drafts that stand now and then: of each request's own likeliest tokens."""
    made = propose(step, counts, seed)
    rng = random.Random(seed)
    for row, name in zip(made.tokens, made.request_ids, strict=True):
        logits = model.forward_full(torch.tensor([list(step.tokens(name))]))[0, -1]
        row.copy_(torch.tensor([int(logits.topk(6).indices[rng.randrange(6)]) for _ in row]))
    return made


def compare(got, expected) -> None:
    """Padding changes the last bits of logits, and so of log-probabilities."""
    bare = [[r._replace(logprobs=None) for r in rs] for rs in (got, expected)]
    assert bare[0] == bare[1]
    for r, want in zip(got, expected, strict=True):
        assert r.logprobs == (
            None if want.logprobs is None else pytest.approx(want.logprobs, abs=1e-4)
        )


def play(model, ours, plain, graphs, turns: int, draw) -> int:
    """Run both through the same turns, any requests in any order; gives the accepted drafts."""
    rng, accepted = random.Random(0), 0
    for turn in range(turns):
        names = [n for n in rng.sample(range(5), rng.randint(1, 5)) if n in plain.active]
        if not names:
            continue
        proposals = [draw(step, names, turn, random.Random(turn)) for step in (plain, ours)]
        plan = plain.plan(proposals[0], names)
        expected = plain.commit(plan, plain.verify(plan, forward_of(model, plain)(plan)))
        verdict = graphs.run(proposals[1], names)
        compare(ours.commit(verdict.plan, verdict), expected)
        accepted += sum(r.num_accepted for r in expected)
        for name in plain.active:
            assert list(ours.tokens(name)) == list(plain.tokens(name))
    ours.blocks.check_integrity()
    return accepted


@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
@pytest.mark.parametrize("kinds", [*KINDS, "mixed"])
def test_replays_equal_eager_steps(model, kinds, rule):
    """Requests come, go and change places: nothing of another one's tables is left behind."""
    chosen = list(KINDS.values()) if kinds == "mixed" else [KINDS[kinds]] * 5
    ours, plain = (started(model, chosen, rule=rule) for _ in range(2))
    graphs = CapturedStep(
        ours,
        forward_of(model, ours),
        [Bucket(5, 4), Bucket(2, 3), Bucket(1, 1)],
        sampling=list(KINDS.values()) if kinds == "mixed" else chosen[:1],
    )

    def draw(step, names, turn, rng):
        return likely(model, step, {n: rng.randint(0, 3) for n in names}, turn)

    assert play(model, ours, plain, graphs, 9, draw) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_are_replayed_dead_ends_included(model, temperature):
    loose = {"temperature": temperature, "stop_token_ids": (), "banned_token_ids": ()}
    kinds = [dataclasses.replace(p, seed=i, **loose) for i, p in enumerate(KINDS.values())]
    ours, plain = (started(model, kinds, bound=(0, 1, 3)) for _ in range(2))
    graphs = CapturedStep(
        ours, forward_of(model, ours), [Bucket(5, 4), Bucket(3, 2)], sampling=kinds,
        constraints=True,
    )  # fmt: skip

    def draw(step, names, turn, rng):
        return likely(model, step, {n: rng.randint(0, 3) for n in names}, turn)

    OddAfterEven.dead_ends = 0
    assert play(model, ours, plain, graphs, 24, draw) > 0
    assert OddAfterEven.dead_ends > 3


@pytest.mark.parametrize("bound", [(), (0, 1)], ids=["free", "bound"])
@pytest.mark.parametrize("rule", ["token_level", "sample_match"])
def test_trees_are_replayed_each_row_by_its_own_history(model, rule, bound):
    kinds = list(KINDS.values())
    ours, plain = (started(model, kinds, bound, rule=rule) for _ in range(2))
    buckets = [Bucket(5, 8, trees=True), Bucket(2, 4, trees=True)]
    graphs = CapturedStep(
        ours, forward_of(model, ours), buckets, sampling=kinds, constraints=bool(bound)
    )

    def draw(step, names, turn, rng):
        made = likely(model, step, dict.fromkeys(names, 3), turn)
        pools = {n: row.tolist() for n, row in zip(made.request_ids, made.tokens, strict=True)}
        return propose_trees(step, rng, has_probs=False, names=list(made.request_ids), likely=pools)

    assert play(model, ours, plain, graphs, 8, draw) > 0


def test_prompts_of_all_kinds_run_through_the_loop(model, monkeypatch):
    """`generate(graphs=True)` captures what its prompts ask for."""
    batch = {
        name: (tokens, kind)
        for (name, (tokens, _)), kind in zip(prompts(5).items(), KINDS.values(), strict=True)
    }
    replayed, verify = [], CapturedStep.verify

    def noted(self, plan):
        replayed.append(self._open is not None and self._open[0] is plan)
        return verify(self, plan)

    monkeypatch.setattr(CapturedStep, "verify", noted)
    runs = []
    for graphs in (False, True):
        tokens: dict[str, list[int]] = {name: [] for name in batch}
        replayed.clear()
        for results in generate(model, make_step(model), batch, graphs=graphs):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        runs.append(tokens)
    assert runs[0] == runs[1]
    assert all(replayed[1:]), "only the prompts are no replay"
    assert len(replayed) > 20


def test_neutral_tables_change_no_bit(model):
    room = ProcessorRoom.of([REPEATS, SHIFTS], 9, True)
    held = ProcessorBuffers(room, [Bucket(3, 4)], VOCAB, torch.device("cpu")).tables(Bucket(3, 4))
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, VOCAB, generator=rng)
    logits[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -1e30])
    history = chain_history(torch.randint(-1, VOCAB, (3, 3), generator=rng))
    assert torch.equal(
        apply_processors(logits, held, history).view(torch.int32), logits.view(torch.int32)
    )
    ids = torch.arange(10)[None, :7]
    one, real = torch.tensor([1]), torch.tensor([2.0])
    given = ProcessorTables(
        Penalties(one, ids, ids, real, real, real), Biases(one, one, one, real), None
    )
    fill(held, given)
    changed = apply_processors(logits, held, history)
    assert not torch.equal(changed[1], logits[1])
    assert torch.equal(changed[2], logits[2])
    fill(held, None)
    assert torch.equal(
        apply_processors(logits, held, history).view(torch.int32), logits.view(torch.int32)
    )


def test_more_than_there_is_room_for_is_refused_before_anything_is_reserved(model):
    step = started(model, [REPEATS, SHIFTS])
    forward, buckets = forward_of(model, step), [Bucket(2, 3)]
    tight = CapturedStep(step, forward, buckets, sampling=[REPEATS, SHIFTS], history=3)
    refused(tight, r"penalties count \d distinct tokens of a request, captured are 3 \(history\)")
    few = dataclasses.replace(SHIFTS, banned_token_ids=(), logit_bias=((1, 1.0),))
    small = CapturedStep(step, forward, buckets, sampling=[REPEATS, few])
    refused(small, "5 tokens are biased, banned or held back, captured are 2 for 2 requests")
    none = CapturedStep(step, forward, buckets, sampling=[SHIFTS])
    refused(none, "penalties count .*none captured", None, [0])
    eager = CapturedStep(step, forward, buckets, sampling=[SHIFTS], eager=True)
    verdict = eager.run()
    assert len(step.commit(verdict.plan, verdict)) == 2


def test_a_constraint_that_was_not_captured_is_refused(model):
    step = started(model, [REPEATS, REPEATS], bound=(1,))
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(2, 3)], sampling=[REPEATS])
    refused(graphs, "a request has a constraint, captured are requests without")
    step.cancel(graphs.plan(None, [0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"history": 0}, "history is 0, accepted are integers >= 1"),
        ({"history": True}, "history is True"),
        ({"history": 2.0, "constraints": 1}, "history is 2.0.*constraints is 1, accepted"),
    ],
)
def test_bad_arguments(model, options, words):
    step = started(model, [PLAIN])
    with pytest.raises(ArgumentError, match=words):
        CapturedStep(step, forward_of(model, step), [Bucket(1, 2)], **options)


def test_buckets_share_the_memory_of_the_largest(model, monkeypatch):
    made, tables = [], ProcessorBuffers.tables
    monkeypatch.setattr(
        captured_module.ProcessorBuffers,
        "tables",
        lambda self, bucket: made.append(tables(self, bucket)) or made[-1],
    )
    step = started(model, [REPEATS])
    CapturedStep(
        step, forward_of(model, step), [Bucket(1, 2), Bucket(4, 3)], sampling=[REPEATS, SHIFTS],
        constraints=True,
    )  # fmt: skip
    small, large = made
    for ours, theirs in zip(
        (*small.penalties, *small.biases, *small.masks),
        (*large.penalties, *large.biases, *large.masks),
        strict=True,
    ):
        assert ours.data_ptr() == theirs.data_ptr()
    assert small.penalties.ids.shape == (1, VOCAB)
