"""Fused acceptance on a GPU: against the pure rules on the same numbers, at a real vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla import SamplingParams, build_step
from specmla.kernels.accept import RULES, fused_accept
from specmla.verify.streams import step_uniforms, target_uniforms
from tests.gpu.test_step_gpu import forward, prompts, tiny
from tests.kernels.accepting import MIXED, PLAIN, Step, make_step

pytestmark = pytest.mark.gpu
WIDTH = 129_280

KINDS = {
    "plain": (PLAIN * 6, 2.0),
    "greedy-beside": ([*PLAIN, SamplingParams(seed=7)] * 4, 2.0),
    "mixed": (MIXED * 2, 3.0),
    "top-p-flat": ([SamplingParams(1.0, 0, 0.9, seed=i) for i in range(4)], 0.3),
    "top-k-wide": ([SamplingParams(1.0, 5000, seed=i) for i in range(4)], 1.0),
}


def differing(step: Step, rule: str) -> Tensor:
    """Give the requests [B] whose tokens differ from those of the rule."""
    got = step.fused(rule)
    want, flagged = step.pure(rule)
    assert not flagged.any()
    assert not got.packed[:, -1].any()
    return (got.packed[:, : want.tokens.shape[1]] != want.tokens).any(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_decisions_are_those_of_the_rule(
    rule: str, kind: str, dense: bool, dtype: torch.dtype
) -> None:
    """A number within some 1e-6 of a border may fall on its other side: one request in 3 steps."""
    params, sharp = KINDS[kind]
    wrong = []
    for seed in range(3):
        step = make_step(
            params,
            num_drafts=4,
            width=WIDTH,
            dense=dense,
            dtype=dtype,
            seed=seed,
            device="cuda",
            sharp=sharp,
        )
        wrong.append(differing(step, rule))
    assert torch.cat(wrong).sum() <= 1


@pytest.mark.parametrize("rule", RULES)
def test_a_request_does_not_depend_on_its_mates(rule: str) -> None:
    step = make_step(MIXED, num_drafts=4, width=WIDTH, seed=3, device="cuda", sharp=2.0)
    logits, table, drafts, q, seeds, positions = step.inputs
    together = step.fused(rule)
    assert q is not None
    for b in range(len(MIXED)):
        one = make_step([MIXED[b]], num_drafts=4, width=WIDTH, seed=3, device="cuda")
        inputs = one.inputs._replace(
            logits=logits[table[b]].contiguous(),
            table=torch.arange(5, device="cuda")[None],
            drafts=drafts[b : b + 1],
            q=q[b : b + 1],
            seeds=seeds[b : b + 1],
            positions=positions[b : b + 1],
        )
        alone = fused_accept(inputs, one.filters, rule)
        assert torch.equal(alone.packed[0], together.packed[b])
        assert torch.equal(alone.row_mass[0], together.row_mass[b])


@pytest.mark.parametrize("rule", RULES)
def test_repeats_are_equal_to_the_bit(rule: str) -> None:
    step = make_step(MIXED * 4, num_drafts=4, width=WIDTH, seed=4, device="cuda", sharp=2.0)
    first = step.fused(rule)
    for _ in range(20):
        again = step.fused(rule)
        assert torch.equal(again.packed, first.packed)
        assert torch.equal(again.row_mass, first.row_mass)


def test_numbers_of_the_kernels_are_those_of_the_streams() -> None:
    """One-hot drafts of probability 1/2 each: the numbers alone decide, and they are known."""
    b, k, width = 512, 4, 256
    params = [SamplingParams(1.0, seed=i) for i in range(b)]
    step = make_step(params, num_drafts=k, width=width, dense=False, device="cuda")
    logits, table, drafts = step.inputs[:3]
    logits.fill_(-50.0)
    drafts.fill_(7)
    logits[:, 7] = 0.0
    logits[:, 9] = 0.0
    got = step.fused("token_level").packed[:, -2]
    u = step_uniforms(step.batch.seeds, step.inputs.positions, k).accept
    assert torch.equal(got, (u < 0.5).long().cumprod(1).sum(1))
    matched = step.fused("sample_match").packed[:, -2]
    u = target_uniforms(step.batch.seeds, step.inputs.positions, k)
    assert torch.equal(matched, (u < 0.5).long().cumprod(1).sum(1))
    del table


@pytest.mark.parametrize("rule", RULES)
def test_sampled_tokens_have_the_distribution_of_the_target(rule: str) -> None:
    """First token of 40,000 requests with one target row, chi square over 12 kept ids."""
    n, width = 40_000, 64
    params = [SamplingParams(0.8, 12, seed=i) for i in range(n)]
    step = make_step(params, num_drafts=2, width=width, device="cuda", seed=5)
    logits, table, drafts, q, _, _ = step.inputs
    generator = torch.Generator(device="cuda").manual_seed(6)
    row = torch.randn(width, generator=generator, device="cuda")
    other = torch.softmax(row + torch.randn(width, generator=generator, device="cuda"), -1)
    logits.copy_(row.expand_as(logits))
    assert q is not None
    q.copy_(other.expand_as(q))
    drawn = torch.multinomial(other, drafts.numel(), replacement=True, generator=generator)
    drafts.copy_(drawn.view_as(drafts))
    top = row.topk(12)
    p = torch.softmax(top.values.double() / 0.8, -1)
    first = step.fused(rule).packed[:, 0]
    counts = torch.stack([(first == i).sum() for i in top.indices]).double()
    assert counts.sum() == n
    want = n * p
    assert ((counts - want) ** 2 / want).sum() < 37.4  # 11 degrees of freedom: p = 1e-4
    del table


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("acceptance", ["torch", "triton"])
def test_nothing_waits_and_results_agree(rule: str, acceptance: str) -> None:
    model = tiny(2, torch.bfloat16)
    step = build_step(model, num_pages=64, rule=rule, acceptance=acceptance)
    kinds = itertools.cycle([*MIXED, SamplingParams(1.0, frequency_penalty=0.5)])
    for i, (prompt, params) in enumerate(zip(prompts(4), kinds, strict=False)):
        step.add(i, prompt, params)
    with torch.no_grad():
        for turn in range(6):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if turn >= 3 else "default")
            try:
                plan = step.plan()
                verdict = step.verify(plan, forward(model, step, plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert all(len(r.new_tokens) == 1 for r in step.commit(plan, verdict))


def test_acceptance_can_be_captured() -> None:
    step = make_step(MIXED * 4, num_drafts=4, width=WIDTH, seed=7, device="cuda", sharp=2.0)
    step.fused("block")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step.fused("block")
    fresh = make_step(MIXED * 4, num_drafts=4, width=WIDTH, seed=8, device="cuda", sharp=2.0)
    for mine, new in zip(step.inputs, fresh.inputs, strict=True):
        assert mine is not None
        assert new is not None
        mine.copy_(new)
    graph.replay()
    assert torch.equal(held.packed, fresh.fused("block").packed)
