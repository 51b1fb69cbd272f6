"""Fused acceptance in a step: the same results as by the rules in torch, and refusals by name."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from specmla import (
    ArgumentError,
    DraftProposal,
    NumericsError,
    RequestResult,
    SamplingParams,
    VerifyStep,
)
from specmla.bucket import Bucket
from specmla.kernels.prims import INTERPRETED
from specmla.verify import judge
from specmla.verify.captured import CapturedStep
from specmla.verify.fused import check_impl
from specmla.verify.rules.lossy_typical import LossyTypical
from specmla.verify.rules.registry import LOSSLESS
from tests.e2e.conftest import model as model
from tests.verify import scripted
from tests.verify.scripted import run
from tests.verify.test_captured import FILTERED, GREEDY, SAMPLED, forward_of, started
from tests.verify.test_captured_trees import propose
from tests.verify.test_seeds import draw_drafts

PARAMS = {
    "plain": SamplingParams(1.0, seed=1, logprobs="processed"),
    "greedy": SamplingParams(seed=2, logprobs="processed"),
    "filtered": SamplingParams(0.9, 6, 0.9, seed=3, min_p=0.01, logprobs="processed"),
    "penalised": SamplingParams(1.0, seed=4, frequency_penalty=0.7, logprobs="raw"),
    "silent": SamplingParams(0.8, seed=5, banned_token_ids=(3, 4)),
}


on_the_cpu = pytest.mark.skipif(
    not INTERPRETED, reason="the scripted step lives on the CPU, where Triton only interprets"
)


def make_step(rule: str, acceptance: str) -> VerifyStep:
    plain = scripted.make_step(rule)
    return VerifyStep(
        cache=plain.cache,
        blocks=plain.blocks,
        builder=plain.builder,
        vocab_size=scripted.W,
        max_seq_len=64,
        rule=rule,
        acceptance=acceptance,
    )


@on_the_cpu
@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_results_are_those_of_torch(rule: str, with_probs: bool) -> None:
    steps = {impl: make_step(rule, impl) for impl in ("torch", "triton")}
    for step in steps.values():
        for i, (name, params) in enumerate(PARAMS.items()):
            step.add(name, [1, 2, 3 + i], params)
    for turn in range(2):
        results = {}
        for impl, step in steps.items():
            drafts, probs = {}, {}
            for wanted in step.draft_requests(2 if turn else 0):
                name, count = str(wanted.request_id), (len(str(wanted.request_id)) + turn) % 3
                if count:
                    drafts[name], probs[name] = draw_drafts(
                        list(wanted.tokens), wanted.sampling.seed or 0, count
                    )
            results[impl] = run(step, drafts or None, probs if with_probs else None)
        for name, want in results["torch"].items():
            got = results["triton"][name]
            assert got._replace(logprobs=None) == want._replace(logprobs=None)
            assert (got.logprobs is None) == (want.logprobs is None)
            assert got.logprobs == pytest.approx(want.logprobs, abs=2e-5)


def test_choice_is_made_once_and_by_name() -> None:
    rules, cpu = list(LOSSLESS.values()), torch.device("cpu")
    for rule in [*rules, LossyTypical()]:
        check_impl("torch", rule, cpu)
    for rule in rules:
        check_impl("triton", rule, torch.device("cuda"))
    assert scripted.make_step("block").acceptance == "torch"
    with pytest.raises(ArgumentError, match="acceptance is 'fast'"):
        check_impl("fast", rules[0], cpu)
    with pytest.raises(ArgumentError, match=r"rule LossyTypical.*accepted are \['block'"):
        check_impl("triton", LossyTypical(), cpu)


@on_the_cpu
def test_float64_logits_are_refused() -> None:
    step = make_step("token_level", "triton")
    step.add("a", [1, 2], SamplingParams(1.0))
    plan = step.plan()
    with pytest.raises(ArgumentError, match=r"acceptance='triton'.*float32"):
        step.verify(plan, torch.zeros(1, scripted.W, dtype=torch.float64))


SHAPES = {
    "plain": (-1, 0, -1, 2),
    "greedy": (-1, -1),
    "filtered": (2, -1, -1, 2),
    "penalised": None,
    "silent": (),
}
"""Trees whose nodes stand in any order, a chain, and a request without drafts."""


def propose_trees(step: VerifyStep, with_probs: bool) -> DraftProposal:
    asked = step.draft_requests(4)
    tokens = torch.full((len(asked), 4), -1)
    probs = torch.zeros(len(asked), 4, scripted.W)
    counts, parents = [], []
    for b, wanted in enumerate(asked):
        shape = SHAPES[str(wanted.request_id)]
        count = 2 if shape is None else len(shape)
        if count:
            made, q = draw_drafts(list(wanted.tokens), wanted.sampling.seed or 0, count)
            tokens[b, :count], probs[b, :count] = torch.tensor(made), q
        counts.append(count)
        parents.append(shape)
    names = tuple(r.request_id for r in asked)
    q = probs if with_probs else None
    return DraftProposal(names, tuple(counts), tokens, q, parents=tuple(parents))


def run_trees(step: VerifyStep, proposal: DraftProposal | None) -> dict[str, RequestResult]:
    plan = step.plan(proposal)
    rows = {}
    for b, request in enumerate(plan.requests):
        parents = request.tree.parents if request.tree else range(request.num_drafts)
        made, lines = plan.drafts[b].tolist(), {0: list(request.state.tokens)}
        for _ in parents:  # until every row knows what it follows
            lines |= {
                row: [*lines[parent], made[row - 1]]
                for row, parent in enumerate(parents, start=1)
                if parent in lines
            }
        for row, line in lines.items():
            rows[int(plan.row_table[b, row])] = scripted.model(line)
    logits = torch.stack([rows[i] for i in range(len(plan.logit_rows))])
    results = step.commit(plan, step.verify(plan, logits))
    return {str(r.request_id): r for r in results}


@on_the_cpu
@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_trees_and_chains_of_a_step_are_decided_as_in_torch(rule: str, with_probs: bool) -> None:
    steps = {impl: make_step(rule, impl) for impl in ("torch", "triton")}
    for step in steps.values():
        for i, (name, params) in enumerate(PARAMS.items()):
            step.add(name, [1, 2, 3 + i], params)
    accepted = set()
    for turn in range(3):
        results = {}
        for impl, step in steps.items():
            proposal = propose_trees(step, with_probs) if turn else None
            results[impl] = run_trees(step, proposal)
        for name, want in results["torch"].items():
            got = results["triton"][name]
            assert got._replace(logprobs=None) == want._replace(logprobs=None)
            assert (got.logprobs is None) == (want.logprobs is None)
            assert got.logprobs == pytest.approx(want.logprobs, abs=2e-5)
            accepted.add((name, want.num_accepted))
    assert len({name for name, count in accepted if count}) > 1


@on_the_cpu
def test_steps_with_trees_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = judge.decide_fused_tree
    monkeypatch.setattr(judge, "decide_fused_tree", lambda *a: calls.append(a) or real(*a))
    step = make_step("token_level", "triton")
    step.add("plain", [1, 2, 3], PARAMS["plain"])
    run_trees(step, None)
    run_trees(step, propose_trees(step, True))
    assert len(calls) == 1


@on_the_cpu
def test_captured_steps_of_trees_decide_by_the_kernels_as_eager_ones_in_torch(model) -> None:
    """Tables of fixed sizes: padded nodes, requests that are not there, trees known to none."""
    kinds = [GREEDY, SAMPLED, FILTERED]
    with torch.no_grad():
        plain, ours = (
            started(model, kinds, rule="block", acceptance=impl) for impl in ("torch", "triton")
        )
        forward = forward_of(model, plain)
        graphs = CapturedStep(
            ours,
            forward_of(model, ours),
            [Bucket(4, 7, trees=True)],
            sampling=kinds,
            draft_probs=None,
        )
        for turn in range(2):
            if not plain.active:
                break
            both = [
                propose(step, random.Random(turn), has_probs=turn % 2 == 1)
                for step in (plain, ours)
            ]
            plan = plain.plan(both[0])
            expected = plain.commit(plan, plain.verify(plan, forward(plan)))
            verdict = graphs.run(both[1])
            assert ours.commit(verdict.plan, verdict) == expected


@on_the_cpu
@pytest.mark.parametrize("parents", [None, (-1, -1, 0, -1)])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_rows_behind_missing_drafts_are_flagged_by_neither(rule: str, parents) -> None:
    """A draft that is missing (-1) leads nowhere: what the model says there is not looked at."""
    results = []
    for impl in ("torch", "triton"):
        step = make_step(rule, impl)
        step.add("a", [1, 2, 3], SamplingParams(1.0, seed=1))
        run(step, None)
        drafts = torch.tensor([[5, -1, 6, 7]])
        proposal = DraftProposal(("a",), (4,), drafts, None, parents=(parents,))
        plan = step.plan(proposal)
        logits = torch.randn(5, scripted.W, generator=torch.Generator().manual_seed(1))
        logits[2] = float("nan")
        results.append(step.commit(plan, step.verify(plan, logits)))
        plan = step.plan(proposal)
        logits[0, 3] = float("nan")
        with pytest.raises(NumericsError, match=r"requests .'a'."):
            step.commit(plan, step.verify(plan, logits))
    assert results[0] == results[1]


@on_the_cpu
@pytest.mark.parametrize("parents", [None, (-1, -1)])
@pytest.mark.parametrize("kind", ["processed", "raw"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_logprobs_of_greedy_rows_without_a_largest_logit(value: float, kind, parents) -> None:
    """They are refused by request, not by what a look-up past the vocabulary does."""
    for impl in ("torch", "triton"):
        step = make_step("token_level", impl)
        step.add("a", [1, 2, 3], SamplingParams(logprobs=kind))
        step.add("b", [1, 2, 3], SamplingParams(1.0, seed=1, logprobs=kind))
        run(step, None)
        drafts = torch.tensor([[5, 6], [5, 6]])
        plan = step.plan(
            DraftProposal(("a", "b"), (2, 2), drafts, None, parents=(parents, parents))
        )
        logits = torch.randn(6, scripted.W, generator=torch.Generator().manual_seed(1))
        logits[0] = value
        with pytest.raises(NumericsError, match="no finite value for requests"):
            step.commit(plan, step.verify(plan, logits))
