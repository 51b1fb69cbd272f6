"""Penalties, biases, bans and held back stops in CUDA graphs: bits of eager calls, no waiting."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from specmla import SamplingParams
from specmla.backends.triton import TritonBackend
from specmla.bucket import Bucket
from specmla.verify.captured import CapturedStep
from tests.gpu.test_graphs_gpu import (
    BACKENDS,
    GREEDY,
    VOCAB,
    forward_of,
    propose,
    started,
    tiny,
    without_graphs,
)

pytestmark = pytest.mark.gpu

LENGTHS = [5, 62, 130, 300, 30]
KINDS = [
    GREEDY,
    SamplingParams(max_tokens=300, repetition_penalty=1.5),
    SamplingParams(0.8, seed=5, max_tokens=300, presence_penalty=0.6, frequency_penalty=0.4),
    SamplingParams(
        0.8, top_k=20, seed=6, max_tokens=300, banned_token_ids=tuple(range(40)),
        logit_bias=((50, 2.0), (51, -1.0)),
    ),
    SamplingParams(max_tokens=300, min_tokens=12, stop_token_ids=tuple(range(200, 230))),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("make", "dtype"), BACKENDS)
def test_replays_equal_eager_calls_to_the_bit(make, dtype, monkeypatch):
    """Over the same buffers; any requests in any order, in two buckets that share memory."""
    model = tiny(dtype)
    ours, eager = (started(model, make(), LENGTHS, KINDS) for _ in range(2))
    buckets, options = [Bucket(5, 5), Bucket(2, 3)], {"sampling": KINDS, "draft_probs": None}
    graphs = CapturedStep(ours, forward_of(model, ours), buckets, **options)
    calls = without_graphs(monkeypatch, eager, forward_of(model, eager), buckets, **options)
    rng = random.Random(0)
    for turn in range(10):
        names = [n for n in rng.sample(range(5), rng.randint(1, 5)) if n in eager.active]
        if not names:
            continue
        counts = {n: rng.randint(0, 4 if len(names) > 2 else 2) for n in names}
        verdicts = []
        for runner in (graphs, calls):
            proposal = propose(runner.step, counts, turn, probs=turn % 2 == 1)
            verdict = runner.run(proposal, names)
            verdicts.append(runner.step.commit(verdict.plan, verdict))
        assert verdicts[0] == verdicts[1]


def test_replays_decide_as_a_plain_step():
    model = tiny(torch.float32)
    ours, plain = (started(model, TritonBackend(), LENGTHS, KINDS) for _ in range(2))
    graphs = CapturedStep(ours, forward_of(model, ours), [Bucket(5, 5)], sampling=KINDS)
    for turn in range(8):
        counts = {n: (turn + n) % 5 for n in plain.active}
        plan = plain.plan(propose(plain, counts, turn, probs=False))
        expected = plain.commit(plan, plain.verify(plan, forward_of(model, plain)(plan)))
        verdict = graphs.run(propose(ours, counts, turn, probs=False))
        assert ours.commit(verdict.plan, verdict) == expected


def test_nothing_waits_and_nothing_grows():
    model = tiny(torch.bfloat16)
    step = started(model, TritonBackend(), LENGTHS, KINDS)
    options = {"sampling": KINDS, "history": VOCAB}
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(5, 5)], **options)
    reserved = 0
    for turn in range(20):
        proposal = propose(step, dict.fromkeys(step.active, 4), turn, probs=False)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn >= 4 else "default")
        try:
            verdict = graphs.run(proposal)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step.commit(verdict.plan, verdict)
        reserved = reserved if turn > 8 else torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved
