"""A request that is taken off and added again with its output goes on as if nothing had been."""

from __future__ import annotations

import pytest
import torch

from specmla import ArgumentError, ArgumentTypeError, OverlappedStep, SamplingParams
from tests.e2e.conftest import VOCAB, make_step
from tests.e2e.conftest import model as model

PROMPT = [5, 9, 5, 7]
ASKED = {
    "penalties": {"presence_penalty": 2.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "late stops": {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    "plain": {},
}


def advance(model, step) -> list[int]:
    plan = step.plan()
    hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
    results = step.commit(plan, step.verify(plan, model.logits(hidden[plan.logit_rows])))
    return [token for r in results for token in r.new_tokens]


@pytest.mark.parametrize("asked", ASKED)
@torch.no_grad()
def test_output_goes_on_where_it_was(model, asked):
    """Limits, penalties and draws: all of them count from the prompt."""
    params = SamplingParams(1.0, seed=4, max_tokens=24, **ASKED[asked])
    want, got = [], []
    step = make_step(model, rule="sample_match")
    step.add("a", PROMPT, params)
    while step.active:
        want += advance(model, step)
    step.add("a", PROMPT, params)
    while step.active:
        got += advance(model, step)
        if step.active and len(got) % 5 == 2:
            step.remove("a")
            step.add("a", PROMPT, params, output=got)
    assert got == want
    assert step.blocks.num_free == step.blocks.num_pages


@torch.no_grad()
def test_output_goes_on_under_overlapped_steps(model):
    params = SamplingParams(1.0, seed=4, max_tokens=24)
    step = make_step(model, rule="sample_match")
    step.add("a", PROMPT, params)
    want = []
    while step.active:
        want += advance(model, step)
    overlap, got, left = OverlappedStep(step), [], {2, 7, 8, 15}
    step.add("a", PROMPT, params)
    while overlap.ready or overlap.num_flying:
        if overlap.ready:
            plan = overlap.plan()
            hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
            overlap.verify(plan, model.logits(hidden[plan.logit_rows]))
        if overlap.num_flying == 2 or not overlap.ready:
            got += [token for r in overlap.commit() for token in r.new_tokens]
            if len(got) in left and step.active:
                left.remove(len(got))
                overlap.remove("a")
                step.add("a", PROMPT, params, output=got)
    assert got == want
    assert not left


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([VOCAB, -1], rf"output holds ids \[-1, {VOCAB}\], accepted are 0 to {VOCAB - 1}"),
        ([1] * 6, "output has 6 tokens, accepted are fewer than max_tokens=6"),
        ([1] * 158, "prompt has 4 tokens, accepted are 1 to 1 before an output of 158"),
    ],
    ids=["foreign ids", "nothing left", "too long"],
)
def test_outputs_that_can_not_go_on_are_refused(model, output, message):
    step = make_step(model)
    with pytest.raises(ArgumentError, match=message):
        step.add("a", PROMPT, SamplingParams(max_tokens=6), output=output)
    assert step.active == ()
    assert "a" not in step.blocks


def test_an_output_is_no_prompt(model):
    step = make_step(model)
    with pytest.raises(ArgumentError, match="prompt has 0 tokens"):
        step.add("a", [], SamplingParams(), output=[1])
    with pytest.raises(ArgumentTypeError, match="output accepts integers"):
        step.add("a", PROMPT, SamplingParams(), output="ab")
