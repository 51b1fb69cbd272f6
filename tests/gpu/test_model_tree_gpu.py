"""Trees of a draft model on a GPU: the drafts of the CPU, nothing that waits, 50,000 draws."""

from __future__ import annotations

import pytest
import torch

from drafters import DraftModelTreeDrafter, SuffixDrafter
from specmla import SamplingParams, build_step, generate
from specmla.cli.checkpoint import load_shipped_pair
from specmla.cli.run import run_loop
from tests.drafters.networks import tiny_target
from tests.e2e.conftest import prompts
from tests.exact_triples import exact_triples, p_value

pytestmark = pytest.mark.gpu


def record(device: str, **sampling) -> tuple[dict, list]:
    """Tokens by request, and every proposal."""
    target = tiny_target().to(device)
    draft = tiny_target(layers=1).to(device)
    step = build_step(target, num_pages=100, page_size=16)
    drafter = DraftModelTreeDrafter(draft, num_pages=100, page_size=16, depth=3)
    real, proposals = drafter.propose, []

    def propose(requests):
        # The first ones compile kernels and fill the allocator's pools.
        if device == "cuda" and len(proposals) > 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            proposals.append(real(requests))
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        return proposals[-1]

    drafter.propose = propose
    tokens: dict = {}
    for results in generate(target, step, prompts(6, **sampling), drafter, 9):
        for r in results:
            tokens.setdefault(r.request_id, []).extend(r.new_tokens)
    return tokens, proposals


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_and_tokens_are_those_of_the_cpu_and_nothing_waits(temperature):
    tokens, proposals = record("cuda", temperature=temperature)
    on_cpu, wanted = record("cpu", temperature=temperature)
    assert tokens == on_cpu
    for got, want in zip(proposals, wanted, strict=True):
        assert got.parents == want.parents
        assert torch.equal(got.tokens.cpu(), want.tokens)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["drawn", "suffix"])
def test_three_tokens_of_50000_draws_follow_the_target(kind):
    """Cells expected below 5 times are pooled; both sides of each rule must have been taken."""
    check_law(torch.device("cuda"), kind, total=50_000, batch=1_000)


def check_law(device: torch.device, kind: str, total: int, batch: int) -> None:
    pair, temperature = load_shipped_pair(device), 0.8
    prompt = min((pair.tokenizer.encode(text).ids for text in pair.prompts), key=len)
    expected = exact_triples(pair.target, prompt, temperature, total)
    counts = dict.fromkeys(expected, 0)
    drafted = accepted = crossed = 0
    suffix = SuffixDrafter(
        pair.target.config.vocab_size, tree=True, max_spec_factor=8.0, min_token_prob=0.01
    )
    for start in range(0, total, batch):
        sampling = [SamplingParams(temperature, seed=start + i, max_tokens=5) for i in range(batch)]
        drafter = suffix
        if kind == "drawn":
            drafter = DraftModelTreeDrafter(pair.draft, num_pages=batch * 3, depth=3)
        run = run_loop(pair.target, [prompt] * batch, sampling, drafter, num_speculative_tokens=8)
        drafted += sum(run.stats.drafted_per_position)
        accepted += sum(run.stats.accepted_per_position)
        crossed += run.stats.num_draft_tokens
        for tokens in run.tokens:
            if tuple(tokens[:3]) in counts:
                counts[tuple(tokens[:3])] += 1
    assert len(expected) > 50
    assert p_value(list(counts.values()), list(expected.values()), total) > 1e-4
    assert drafted > total / 2
    assert drafted / 20 < accepted < drafted
    assert crossed > drafted  # trees, not chains
