"""The shipped MTP, DFlash and DSpark drafters: lossless, at all depths, and as good as trained."""

from __future__ import annotations

import pytest
import torch

from specmla import SamplingParams
from specmla.cli.checkpoint import load_shipped_pair
from specmla.cli.named import make_named
from specmla.cli.run import run_loop
from specmla.testing import check_drafter
from tests.e2e.test_shipped_pair import exact_pairs, p_value

TOKENS = 48
DEPTH = {"mtp": 4, "dflash": 7, "dspark": 7}
# Tokens a step on the shipped prompts, greedy and at temperature 1: a tenth or more below what
# they yield, and above what they do with a norm left out or another rotary base.
LEAST = {"mtp": (2.5, 1.9), "dflash": (2.3, 1.7), "dspark": (2.6, 2.0)}
TREE = "dflash-tree"


@pytest.fixture(scope="module")
def pair():
    return load_shipped_pair(torch.device("cpu"))


@pytest.fixture(scope="module")
def token_prompts(pair):
    return [pair.tokenizer.encode(text).ids for text in pair.prompts]


def sampled(count: int, temperature: float, most: int = TOKENS, first: int = 0):
    return [
        SamplingParams(temperature, seed=first + i, max_tokens=most) for i in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain(pair, token_prompts):
    """Tokens of plain decoding, by temperature, drawn as sample-match draws them."""
    return {
        t: run_loop(
            pair.target, token_prompts, sampled(len(token_prompts), t), rule="sample_match"
        ).tokens
        for t in (0.0, 1.0)
    }


def draft(pair, prompts, sampling, name: str, *, drafts: int | None = None, rule="token_level"):
    k = drafts or DEPTH[name.removesuffix("-tree")]
    longest = max(map(len, prompts)) + max(s.max_tokens for s in sampling) + k + 1
    make = make_named(name, pair.target, num_requests=len(prompts), longest=longest)
    return run_loop(pair.target, prompts, sampling, make, num_speculative_tokens=k, rule=rule)


@pytest.mark.parametrize("name", [*DEPTH, TREE])
def test_greedy_output_equals_plain_decoding(pair, token_prompts, plain, name):
    run = draft(pair, token_prompts, sampled(len(token_prompts), 0.0), name)
    assert run.tokens == plain[0.0]
    assert run.stats.tokens_per_step > LEAST[name.removesuffix("-tree")][0]
    if name != TREE:
        assert len(run.stats.drafted_per_position) == DEPTH[name]
        assert min(run.stats.drafted_per_position) > 20
        assert min(run.stats.accepted_per_position[:4]) > 0


@pytest.mark.parametrize("name", DEPTH)
def test_sampled_drafts_are_taken_as_often_as_trained(pair, token_prompts, name):
    run = draft(pair, token_prompts, sampled(len(token_prompts), 1.0), name, rule="block")
    assert run.stats.tokens_per_step > LEAST[name][1]


@pytest.mark.parametrize("name", [*DEPTH, TREE])
def test_sample_match_gives_what_plain_sampling_gives(pair, token_prompts, plain, name):
    """Token for token, of equal seeds: there the law of the output needs no statistics."""
    sampling = sampled(len(token_prompts), 1.0)
    run = draft(pair, token_prompts, sampling, name, rule="sample_match")
    assert run.tokens == plain[1.0]
    assert run.stats.num_accepted_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"), [("mtp", "token_level"), ("dflash", "block"), ("dspark", "block")]
)
def test_sampled_pairs_follow_the_target(pair, token_prompts, name, rule):
    """Chi-square over the first two new tokens; the rule decides the second in a drafted step."""
    total, batch, temperature = 2048, 256, 0.8
    prompt = min(token_prompts, key=len)[:12]
    counts: dict[tuple[int, ...], int] = {}
    accepted = 0
    for start in range(0, total, batch):
        sampling = sampled(batch, temperature, 4, start)
        run = draft(pair, [prompt] * batch, sampling, name, drafts=3, rule=rule)
        accepted += run.stats.accepted_per_position[0]
        for tokens in run.tokens:
            counts[tuple(tokens[:2])] = counts.get(tuple(tokens[:2]), 0) + 1
    cells = exact_pairs(pair, prompt, temperature, 5.0, total)
    observed = [counts.get(cell, 0) for cell in cells]
    expected = [p * total for p in cells.values()]
    observed.append(total - sum(observed))  # the rest, pooled
    expected.append(total - sum(expected))
    assert len(cells) > 10
    assert p_value(observed, expected) > 1e-3
    assert total / 4 < accepted < total


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPTH)
def test_their_distributions_caches_and_seeds_are_honest(pair, name):
    make = make_named(name, pair.target, num_requests=250, longest=60)
    found = check_drafter(make, pair.target, num_drafts=DEPTH[name], num_samples=250)
    found.raise_if_failed()
    assert len(found.passed) == 3
