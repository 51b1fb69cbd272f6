"""Overlapped steps as real CUDA graphs: the same tokens, nothing waits, the host runs ahead."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from drafters import NgramDrafter
from specmla import CapturedOverlap, OverlappedStep, SamplingParams, build_step, generate
from specmla.bucket import Bucket
from specmla.cli.difference import first_difference
from specmla.verify import captured_overlap
from tests.gpu.test_graphs_gpu import pool_bits
from tests.gpu.test_overlap_gpu import K, device_drafts, drafts_ahead
from tests.gpu.test_step_gpu import VOCAB, forward, prompts, tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


ASKED = pytest.mark.parametrize(
    "asked", [{}, {"frequency_penalty": 0.5, "banned_token_ids": (1, 2)}], ids=["plain", "asked"]
)


def made(backend: str, dtype: torch.dtype, temperature: float = 0.0, **asked):
    """A captured overlapped step over four requests whose prompts are under way."""
    model = tiny(2, dtype)
    step = build_step(model, num_pages=64, backend=backend)
    for i in range(step.cache.num_layers):
        step.cache.layer(i).zero_()
    kinds = [SamplingParams(temperature, seed=i, max_tokens=90, **asked) for i in range(4)]
    overlap = OverlappedStep(step)
    graphs = CapturedOverlap(
        overlap,
        lambda plan: forward(model, step, plan),
        [Bucket(4, 1 + K)],
        sampling=kinds[:1],
        eager=True,
    )
    for i, prompt in enumerate(prompts(4)):
        step.add(i, prompt, kinds[i])
    graphs.verify(graphs.plan())
    return overlap, graphs


def turns(overlap, graphs, count: int) -> list:
    """Run steps with drafts of both kinds and without; the results."""
    drafter, names, found = NgramDrafter(VOCAB, prompt_lookup_min=1), list(range(4)), []
    for i in range(count):
        drafts = [None, device_drafts(overlap, names), drafts_ahead(overlap, names, drafter)][i % 3]
        graphs.verify(graphs.plan(drafts))
        found.append(overlap.commit())
    return [*found, overlap.commit()]


@ASKED
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backend", ["triton", "rows"])
def test_replays_equal_their_calls_to_the_bit(backend, temperature, asked, monkeypatch):
    ours, graphs = made(backend, torch.bfloat16, temperature, **asked)
    monkeypatch.setattr(captured_overlap, "record", lambda call, device, pool=None: call)
    eager, calls = made(backend, torch.bfloat16, temperature, **asked)
    assert turns(ours, graphs, 12) == turns(eager, calls, 12)
    assert torch.equal(pool_bits(ours.step), pool_bits(eager.step))


@ASKED
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nothing_waits_from_plan_to_verify(temperature, asked):
    overlap, graphs = made("triton", torch.bfloat16, temperature, **asked)
    names, drafter = list(range(4)), NgramDrafter(VOCAB, prompt_lookup_min=1)
    for i in range(12):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i >= 4 else "default")
        try:
            drafts = drafts_ahead(overlap, names, drafter) if i % 2 else None
            graphs.verify(graphs.plan(drafts or device_drafts(overlap, names)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert graphs._open is not None
        overlap.commit()
        overlap.step.blocks.check_integrity()


def test_the_host_is_done_with_a_step_while_the_one_before_runs():
    overlap, graphs = made("triton", torch.bfloat16)
    names = list(range(4))
    for _ in range(4):
        graphs.verify(graphs.plan(device_drafts(overlap, names)))
        overlap.commit()
    overlap.commit()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second before the first of two steps
    graphs.verify(graphs.plan(device_drafts(overlap, names)))
    first = overlap._flights.flying[0].verdict
    graphs.verify(graphs.plan(device_drafts(overlap, names)))
    assert not first.event.query(), "planned and enqueued before the first verdict was there"
    assert all(r.new_tokens for r in overlap.commit())
    assert all(r.new_tokens for r in overlap.commit())


@pytest.mark.parametrize("has_drafter", [False, True], ids=["plain", "ngram"])
def test_greedy_tokens_equal_the_plain_loop_up_to_rounding_ties(has_drafter):
    model, batch = tiny(3, torch.float32), prompts(5)
    given = {i: (p, SamplingParams(max_tokens=64)) for i, p in enumerate(batch)}
    out = []
    for captured in (False, True):
        step = build_step(model, num_pages=64, backend="triton")
        drafter = NgramDrafter(VOCAB, prompt_lookup_min=1) if has_drafter else None
        tokens: list[list[int]] = [[] for _ in batch]
        loop = generate(model, step, given, drafter, 4, graphs=captured, overlap=captured)
        for results in loop:
            for r in results:
                tokens[r.request_id] += r.new_tokens
        assert step.blocks.num_free == step.blocks.num_pages
        out.append(tokens)
    difference = first_difference(model, batch, *out)
    assert difference is None or difference.top1_margin <= 1e-4
