"""Overlapped stepping on a real stream: nothing waits from plan to verify, the host runs ahead."""

from __future__ import annotations

import pytest
import torch

from drafters import NgramDrafter
from specmla import (
    DraftProposal,
    DraftsAhead,
    OverlappedStep,
    SamplingParams,
    build_step,
    generate,
)
from specmla.cli.difference import first_difference
from tests.gpu.test_step_gpu import VOCAB, forward, prompts, tiny

pytestmark = pytest.mark.gpu
K = 3


def device_drafts(overlap: OverlappedStep, names: list[int]) -> DraftProposal:
    """Draft on the device from tokens and positions that the host does not know."""
    wanted = overlap.draft_requests(K, names)
    at = overlap.anchors([r.request_id for r in wanted])
    place = torch.arange(K, device="cuda")
    tokens = (at.tokens[:, None] * 7 + at.positions[:, None] + place) % VOCAB
    ids = tuple(r.request_id for r in wanted)
    return DraftProposal(ids, tuple(r.num_drafts for r in wanted), tokens)


def drafts_ahead(overlap: OverlappedStep, names: list[int], drafter: NgramDrafter) -> DraftsAhead:
    return DraftsAhead(drafter.propose(overlap.draft_requests(K, names, ahead=True)), K)


def turn(model, overlap, drafts) -> None:
    plan = overlap.plan(drafts)
    overlap.verify(plan, forward(model, overlap.step, plan))


@pytest.mark.parametrize("asked", [{}, {"frequency_penalty": 0.5, "banned_token_ids": (1, 2)}],
                         ids=["plain", "processors"])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backend", ["triton", "rows", "reference"])
def test_nothing_waits_from_plan_to_verify(backend, temperature, asked):
    model = tiny(2, torch.bfloat16)
    step = build_step(model, num_pages=64, backend=backend)
    overlap, names = OverlappedStep(step), list(range(4))
    drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
    for i, prompt in enumerate(prompts(4)):
        step.add(i, prompt, SamplingParams(temperature, top_p=0.9, seed=i, max_tokens=90, **asked))
    with torch.no_grad():
        turn(model, overlap, None)
        for i in range(12):
            # The first turns compile kernels and fill the allocator's pools.
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if i >= 6 else "default")
            try:
                drafts = drafts_ahead(overlap, names, drafter) if i % 2 else None
                turn(model, overlap, drafts or device_drafts(overlap, names))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            results = overlap.commit()
            assert all(r.num_drafts <= K for r in results)
            step.blocks.check_integrity()


def test_the_host_is_done_with_a_step_while_the_one_before_runs():
    model = tiny(2, torch.bfloat16)
    step = build_step(model, num_pages=64, backend="triton")
    overlap, names = OverlappedStep(step), list(range(4))
    for i, prompt in enumerate(prompts(4)):
        step.add(i, prompt, SamplingParams(max_tokens=90))
    with torch.no_grad():
        turn(model, overlap, None)
        for _ in range(6):
            turn(model, overlap, device_drafts(overlap, names))
            overlap.commit()
        overlap.commit()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second before the first of two steps
        turn(model, overlap, device_drafts(overlap, names))
        first = overlap._flights.flying[0].verdict
        turn(model, overlap, device_drafts(overlap, names))
        assert not first.event.query(), "planned and enqueued before the first verdict was there"
        assert all(r.new_tokens for r in overlap.commit())
        assert all(r.new_tokens for r in overlap.commit())


@pytest.mark.parametrize("backend", ["triton", "rows"])
@pytest.mark.parametrize("has_drafter", [False, True], ids=["plain", "ngram"])
def test_greedy_tokens_equal_the_plain_loop_up_to_rounding_ties(backend, has_drafter):
    model, batch = tiny(3, torch.float32), prompts(5)
    given = {i: (p, SamplingParams(max_tokens=64)) for i, p in enumerate(batch)}
    out = []
    for overlap in (False, True):
        step = build_step(model, num_pages=64, backend=backend)
        drafter = NgramDrafter(VOCAB, prompt_lookup_min=1) if has_drafter else None
        tokens: list[list[int]] = [[] for _ in batch]
        for results in generate(model, step, given, drafter, 4, overlap=overlap):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        assert step.blocks.num_free == step.blocks.num_pages
        out.append(tokens)
    difference = first_difference(model, batch, *out)
    assert difference is None or difference.top1_margin <= 1e-4
