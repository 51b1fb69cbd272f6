"""The shipped pair: greedy output is lossless, sampled output has the target's distribution."""

from __future__ import annotations

import pytest
import torch

from drafters import DraftModelDrafter, NgramDrafter
from specmla import SamplingParams
from specmla.cli.checkpoint import load_shipped_pair
from specmla.cli.run import run_loop


@pytest.fixture(scope="module")
def pair():
    return load_shipped_pair(torch.device("cpu"))


@pytest.fixture(scope="module")
def token_prompts(pair):
    return [pair.tokenizer.encode(text).ids for text in pair.prompts]


def make_drafter(pair, name: str, num_pages: int = 600):
    if name == "ngram":
        return NgramDrafter(pair.target.config.vocab_size)
    return DraftModelDrafter(pair.draft, num_pages=num_pages)


def test_prompts_have_different_lengths(token_prompts):
    assert len(token_prompts) >= 4
    assert len({len(p) for p in token_prompts}) >= 4


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_greedy_output_equals_plain_decoding(pair, token_prompts, name):
    sampling = [SamplingParams(max_tokens=48)] * len(token_prompts)
    plain = run_loop(pair.target, token_prompts, sampling)
    run = run_loop(pair.target, token_prompts, sampling, make_drafter(pair, name))
    assert run.tokens == plain.tokens
    assert run.stats.num_accepted_draft_tokens > 0


def exact_pairs(pair, prompt: list[int], temperature: float, expectation: float, total: int):
    """p(t1, t2) of every pair that is expected at least `expectation` times in `total` draws."""
    with torch.no_grad():
        first = pair.target.forward_full(torch.tensor([prompt]))[0, -1].double()
        p1 = torch.softmax(first / temperature, -1)
        likely = [int(t) for t in (p1 * total >= expectation).nonzero()]
        batch = torch.tensor([[*prompt, t] for t in likely])
        second = pair.target.forward_full(batch)[:, -1].double()
        p2 = torch.softmax(second / temperature, -1)
    joint = p1[likely][:, None] * p2
    kept = (joint * total >= expectation).nonzero().tolist()
    return {(likely[i], t): float(joint[i, t]) for i, t in kept}


def p_value(observed: list[int], expected: list[float]) -> float:
    """Chance of a chi-square as large as this one, from the regularised incomplete gamma."""
    chi = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(chi / 2).double()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_sampled_pairs_follow_the_target(pair, token_prompts, name):
    """Chi-square over the first two new tokens: the second one comes from a drafted step.

    A third one must be allowed: the bonus token takes one of what may still be emitted.
    """
    total, batch, temperature = 4096, 256, 0.8
    prompt = min(token_prompts, key=len)
    counts: dict[tuple[int, ...], int] = {}
    drafted = 0
    for start in range(0, total, batch):
        sampling = [
            SamplingParams(temperature=temperature, seed=start + i, max_tokens=3)
            for i in range(batch)
        ]
        drafter = make_drafter(pair, name, num_pages=batch * 4)
        run = run_loop(pair.target, [prompt] * batch, sampling, drafter, num_speculative_tokens=3)
        drafted += run.stats.num_draft_tokens
        for tokens in run.tokens:
            seen = tuple(tokens[:2])
            counts[seen] = counts.get(seen, 0) + 1
    cells = exact_pairs(pair, prompt, temperature, 5.0, total)
    observed = [counts.get(cell, 0) for cell in cells]
    expected = [p * total for p in cells.values()]
    observed.append(total - sum(observed))  # the rest, pooled
    expected.append(total - sum(expected))
    assert len(cells) > 20
    assert p_value(observed, expected) > 1e-3
    assert name == "ngram" or drafted > total / 2


def test_the_chi_square_test_can_fail():
    assert p_value([60, 40], [50.0, 50.0]) < 0.05
    assert p_value([50, 50], [50.0, 50.0]) == pytest.approx(1.0)
