"""Drafts by captured rounds: the tokens of host-driven ones, made without asking the device.

On a CPU a replay calls the captured function again; with real graphs the same is run in
tests/gpu/test_graphs_drafters_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters import DraftModelDrafter
from drafters.model_rounds import ModelRounds
from specmla import ArgumentError, Bucket, SamplingParams, generate
from specmla.verify.draft_graphs import DraftGraphs
from tests.drafters import guards
from tests.drafters.guards import guarded as guarded
from tests.drafters.test_draft_model import Checked, tiny
from tests.e2e.conftest import make_step, prompts


@pytest.fixture(scope="module")
def target():
    return tiny(2, 32, 1)


@pytest.fixture
def replays(monkeypatch):
    """Count the replays of drafts, by the size of their bucket."""
    counts: dict[tuple[int, int], int] = {}
    real = DraftGraphs.run

    def run(self, graph, *args):
        size = (graph.num_requests, graph.num_drafts)
        counts[size] = counts.get(size, 0) + 1
        return real(self, graph, *args)

    monkeypatch.setattr(DraftGraphs, "run", run)
    return counts


def loop(target, batch, drafter, k=4, *, graphs, step=None):
    """Run to the end; new tokens by request, and every proposal as (name, drafts, probs)."""
    step = step or make_step(target)
    start, proposals, real = step.blocks.num_free, [], drafter.propose

    def propose(requests):
        given = real(requests)
        for i, (name, count) in enumerate(zip(given.request_ids, given.counts, strict=True)):
            probs = (
                given.probs if isinstance(given.probs, torch.Tensor | None) else given.probs.probs
            )
            probs = None if probs is None else probs[i, :count].clone()
            proposals.append((name, given.tokens[i].tolist(), count, probs))
        return given

    drafter.propose = propose
    tokens = {name: [] for name in batch}
    for results in generate(target, step, batch, drafter, k, graphs=graphs):
        step.blocks.check_integrity()
        for r in results:
            tokens[r.request_id] += r.new_tokens
    assert step.blocks.num_free == start
    return tokens, proposals


def made(draft, kind=DraftModelDrafter, page_size=4):
    drafter = kind(draft, num_pages=600, page_size=page_size, backend="reference")
    for layer in range(draft.config.num_layers):
        drafter.cache.layer(layer).fill_(float("nan"))
    return drafter


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("same_model", [False, True])
def test_greedy_drafts_equal_a_full_pass_of_the_draft_model(target, page_size, same_model, replays):
    draft = target if same_model else tiny(1, 16, 2)
    plain, _ = loop(target, prompts(6), made(draft), graphs=False)
    drafter = made(draft, Checked, page_size)
    tokens, _ = loop(target, prompts(6), drafter, graphs=True)
    assert tokens == plain
    assert drafter.checked > 100
    assert sum(replays.values()) > 5
    assert len(replays) > 1, "the batch shrinks: smaller buckets take over"
    assert drafter.blocks.num_free == 600


KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_proposals_are_those_of_host_driven_rounds(target, kind, replays):
    """The same drafts from the same seeds, and the distributions they were drawn from."""
    if kind == "mixed":
        batch = prompts(6, temperature=0.9)
        for name in ("r1", "r3"):
            batch[name] = (batch[name][0], SamplingParams(max_tokens=24, logprobs="raw"))
    else:
        batch = prompts(6, **KINDS[kind])
    wanted = {"r0": 4, "r1": 2, "r2": 4, "r4": 3, "r5": 1}
    runs = [loop(target, batch, made(tiny(1, 16, 2)), wanted, graphs=g) for g in (False, True)]
    assert sum(replays.values()) > 8
    assert runs[0][0] == runs[1][0]
    assert len(runs[0][1]) == len(runs[1][1])
    for ours, plain in zip(runs[1][1], runs[0][1], strict=True):
        assert ours[:3] == plain[:3]
        assert (ours[3] is None) == (plain[3] is None)
        if ours[3] is not None:
            torch.testing.assert_close(ours[3], plain[3], atol=1e-5, rtol=1e-3)


def test_requests_that_were_not_drafted_for_catch_up_before_the_graph(target, replays):
    drafter, turn = made(tiny(1, 16, 2), Checked), iter(range(10_000))
    real = drafter.propose
    drafter.propose = lambda requests: real([r for r in requests if next(turn) % 3 == 0])
    plain, _ = loop(target, prompts(6), made(tiny(1, 16, 2)), graphs=False)
    tokens, _ = loop(target, prompts(6), drafter, graphs=True)
    assert tokens == plain
    assert drafter.checked
    assert replays


def test_what_was_not_captured_is_drafted_by_the_host(target, replays):
    """More requests or drafts than any bucket has, and parameters of another kind."""
    plain, _ = loop(target, prompts(6), made(tiny(1, 16, 2)), graphs=False)
    tokens, _ = loop(target, prompts(6), made(tiny(1, 16, 2)), graphs=[Bucket(2, 5), Bucket(5, 9)])
    assert tokens == plain
    assert set(replays) <= {(2, 4), (5, 8)}
    assert sum(replays.values()) < 20
    drafter = made(tiny(1, 16, 2))
    drafter.capture([Bucket(8, 5)], [SamplingParams()])
    replays.clear()
    loop(target, prompts(6, temperature=1.0), drafter, graphs=False)
    assert not replays


def test_a_draft_models_own_limits_hold(target, replays):
    """A shorter context and a smaller vocabulary than the target's."""
    draft = tiny(1, 16, 2, limit=24, vocab=target.config.vocab_size - 20)
    plain, _ = loop(target, prompts(6), made(tiny(1, 16, 2)), graphs=False)
    step = make_step(target, allow_vocab_mismatch=True)
    tokens, _ = loop(target, prompts(6), made(draft), graphs=True, step=step)
    assert tokens == plain
    assert replays


def test_a_proposal_outlives_the_next_one(target):
    drafter, kept, copies = made(tiny(1, 16, 2)), [], []
    real = drafter.propose

    def propose(requests):
        kept.append(real(requests))
        copies.append((kept[-1].tokens.clone(), kept[-1].probs.clone()))
        return kept[-1]

    drafter.propose = propose
    loop(target, prompts(3, temperature=1.0), drafter, graphs=True)
    assert len(kept) > 3
    for proposal, (tokens, probs) in zip(kept, copies, strict=True):
        assert torch.equal(proposal.tokens, tokens)
        assert torch.equal(proposal.probs, probs)


def test_what_was_captured_is_not_captured_again(target, monkeypatch):
    drafter = made(tiny(1, 16, 2))
    drafter.capture([Bucket(4, 5), Bucket(2, 1)], [SamplingParams(), SamplingParams(1.0)])
    chains = drafter._chains
    drafter.capture([Bucket(4, 5, ragged=False)], [SamplingParams(0.5)])
    assert drafter._chains is chains
    drafter.capture([Bucket(4, 4)], [SamplingParams()])
    assert drafter._chains is not chains


def test_a_capture_needs_something_to_capture(target):
    drafter = made(tiny(1, 16, 2))
    with pytest.raises(ArgumentError, match=r"buckets has none of two rows.*sampling is empty"):
        drafter.capture([Bucket(4, 1)], [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_reads_nothing_back(target, temperature, guarded):
    loop(target, prompts(4, temperature=temperature), made(tiny(1, 16, 2)), graphs=True)
    assert len(guarded) > 5


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "bool", "nonzero"])
def test_the_guards_see_what_reads_back(target, read, guarded, monkeypatch):
    reads = {
        "item": lambda x: x.argmax().item(),
        "tolist": lambda x: x.argmax().tolist(),
        "cpu": lambda x: x.cpu(),
        "bool": lambda x: bool((x > 0).any()),
        "nonzero": lambda x: x[x > 0],
    }
    real = ModelRounds.logits

    def logits(self, out):
        reads[read](out)
        return real(self, out)

    monkeypatch.setattr(ModelRounds, "logits", logits)
    monkeypatch.setattr(guards, "ROOTS", [guards.PACKAGE, Path(__file__).parent])
    with pytest.raises(AssertionError, match="in tests/drafters/test_captured_drafts"):
        loop(target, prompts(2), made(tiny(1, 16, 2)), graphs=True)
