"""Drafters on hidden states on a GPU: the drafts of the CPU, and nothing that waits."""

from __future__ import annotations

import pytest
import torch

from drafters import DFlashDrafter, DSparkDrafter, MTPDrafter
from specmla import SamplingParams, build_step, generate
from tests.drafters.networks import tiny_block, tiny_mtp, tiny_target
from tests.e2e.conftest import prompts

pytestmark = pytest.mark.gpu
KINDS = ("mtp", "dflash", "dspark")


def make(kind: str, device: str):
    target = tiny_target().to(device)
    step = build_step(target, num_pages=100, page_size=16, num_draft_layers=1)
    if kind == "mtp":
        return target, step, MTPDrafter(target, tiny_mtp(target).to(device), step)
    draft = tiny_block(target, kind).to(device)
    made = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}[kind]
    return target, step, made(target, draft, num_pages=60, page_size=32)


def record(kind: str, device: str, **sampling) -> tuple[dict, list]:
    """Tokens by request, and every proposal."""
    target, step, drafter = make(kind, device)
    real, proposals = drafter.propose, []

    def propose(requests):
        proposals.append(real(requests))
        return proposals[-1]

    drafter.propose = propose
    tokens: dict = {}
    for results in generate(target, step, prompts(6, **sampling), drafter, 4):
        for r in results:
            tokens.setdefault(r.request_id, []).extend(r.new_tokens)
    return tokens, proposals


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_tokens_are_those_of_the_cpu(kind, temperature):
    with torch.autocast("cuda", enabled=False):
        tokens, proposals = record(kind, "cuda", temperature=temperature)
    on_cpu, wanted = record(kind, "cpu", temperature=temperature)
    assert tokens == on_cpu
    assert len(proposals) == len(wanted)
    for got, want in zip(proposals, wanted, strict=True):
        assert got.request_ids == want.request_ids
        assert torch.equal(got.tokens.cpu(), want.tokens)
        if want.probs is not None:
            torch.testing.assert_close(got.probs.cpu(), want.probs, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_does_not_wait_for_the_device(kind):
    target, step, drafter = make(kind, "cuda")
    real = drafter.propose

    def propose(requests):
        if not any(len(r.tokens) > 6 for r in requests):  # the first ones compile kernels
            return real(requests)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    drafter.propose = propose
    batch = {
        i: ([3, 1, 4, 1], SamplingParams(temperature=float(i), seed=i, max_tokens=20))
        for i in range(2)
    }
    for _ in generate(target, step, batch, drafter, 3):
        pass
