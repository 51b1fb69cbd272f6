"""`generate(..., overlap=True)`: tokens of the plain loop, refusals, what errors leave behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters import DraftModelDrafter, NgramDrafter, SuffixDrafter
from specmla import (
    FixedBudget,
    SamplingParams,
    UnsupportedError,
    build_step,
    generate,
)
from tests.e2e.conftest import VOCAB, make_step, prompts, run
from tests.e2e.conftest import model as model


def overlapped(model, batch, drafter=None, k=4, step=None) -> tuple[dict, list]:
    step = step or make_step(model)
    tokens: dict = {name: [] for name in batch}
    history = []
    for results in generate(model, step, batch, drafter, k, overlap=True):
        step.blocks.check_integrity()
        history += results
        for r in results:
            tokens[r.request_id] += r.new_tokens
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages
    return tokens, history


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_decoding_overlaps(model, temperature):
    batch = prompts(5, temperature=temperature)
    assert overlapped(model, batch)[0] == run(model, batch)[0]


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: NgramDrafter(VOCAB, prompt_lookup_min=1),
        lambda: SuffixDrafter(VOCAB, min_token_prob=0.01, max_spec_offset=4),
    ],
    ids=["ngram", "suffix"],
)
def test_drafts_ahead_are_accepted_and_lose_nothing(model, drafter):
    batch = {i: ([*range(9), *range(i, 8)], SamplingParams(max_tokens=60)) for i in range(4)}
    plain = run(model, batch)[0]
    tokens, history = overlapped(model, batch, drafter())
    assert tokens == plain
    assert sum(r.num_accepted for r in history) > 8
    assert max(r.num_drafts for r in history) == 4


def test_draws_keyed_by_position_are_those_of_plain_decoding(model):
    batch = prompts(4, temperature=0.7)
    plain = run(model, batch, step=make_step(model, rule="sample_match"))[0]
    drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
    step = make_step(model, rule="sample_match")
    assert overlapped(model, batch, drafter, step=step)[0] == plain


def test_what_can_not_overlap_is_refused_by_name(model):
    step, batch = make_step(model), prompts(2)
    cases = [
        ({"drafter": DraftModelDrafter(model, num_pages=20)}, "DraftModelDrafter drafts after"),
        ({"drafter": SuffixDrafter(VOCAB, tree=True)}, "SuffixDrafter drafts after"),
        ({"num_speculative_tokens": FixedBudget(2)}, "is a FixedBudget"),
    ]
    for given, reason in cases:
        with pytest.raises(UnsupportedError, match=reason):
            next(generate(model, step, batch, **given, overlap=True))
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_and_bans_overlap(model, temperature, graphs):
    """Without graphs, and in those that are captured for them."""
    batch = prompts(4, temperature=temperature)
    asked = [{"frequency_penalty": 3.0}, {"banned_token_ids": tuple(range(30))}, {}, {}]
    for (name, (tokens, params)), extra in zip(list(batch.items()), asked, strict=True):
        kept = dataclasses.replace(params, max_tokens=6 + 6 * len(extra), **extra)
        batch[name] = (tokens, kept)
    plain, found = run(model, batch)[0], {name: [] for name in batch}
    for results in generate(model, make_step(model), batch, overlap=True, graphs=graphs):
        for r in results:
            found[r.request_id] += r.new_tokens
    assert found == plain
    assert plain != run(model, prompts(4, temperature=temperature))[0]


def test_a_loop_left_in_its_middle_leaves_nothing(model):
    step, batch = make_step(model), prompts(3)
    drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
    loop = generate(model, step, batch, drafter, overlap=True)
    for _ in range(4):
        next(loop)
    loop.close()
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages
    step.blocks.check_integrity()
    assert run(model, batch, step=step)[0] == run(model, batch)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu covers this")
@pytest.mark.parametrize("backend", ["triton", "rows"])
def test_interpreted_backends_follow_the_reference(model, backend):
    """Limits within reach of K make rows inert in most steps."""
    batch = {i: ([5, 6, 7, 5, 6, 7, 5 + i], SamplingParams(max_tokens=4 + i)) for i in range(3)}
    plain = run(model, batch)[0]
    step = build_step(model, num_pages=20, page_size=16, backend=backend)
    for layer in range(model.config.num_layers):
        step.cache.layer(layer).fill_(float("nan"))
    drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
    tokens, history = overlapped(model, batch, drafter, 3, step)
    assert tokens == plain
    assert any(r.num_drafts for r in history)
