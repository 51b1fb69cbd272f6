"""`RequestState`: what a request may bring, before anything is registered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specmla import ArgumentError, ArgumentTypeError, SamplingParams
from tests.verify import scripted
from tests.verify.test_step import W, make_step


@pytest.mark.parametrize(
    "prompt",
    [bytes(range(8)), bytearray(range(8)), np.arange(8), torch.arange(8), tuple(range(8))],
    ids=["bytes", "bytearray", "numpy", "tensor", "tuple"],
)
def test_every_sequence_of_integers_is_a_prompt(prompt):
    """Eight bytes are eight tokens, not one number of 64 bits."""
    step = make_step()
    step.add("a", prompt, SamplingParams())
    assert list(step.tokens("a")) == list(range(8))


@pytest.mark.parametrize(
    "prompt", [[1.0, 2.0], "abc", None, [2**70]], ids=["floats", "text", "none", "wide"]
)
def test_other_prompts_are_refused(prompt):
    step = make_step()
    with pytest.raises(ArgumentTypeError, match="request 'a': prompt accepts integers"):
        step.add("a", prompt, SamplingParams())
    assert step.active == ()
    assert "a" not in step.blocks


def test_other_parameters_are_refused():
    step = make_step()
    with pytest.raises(ArgumentTypeError, match="sampling is None, accepted are SamplingParams"):
        step.add("a", [1], None)
    assert step.active == ()
    assert "a" not in step.blocks


@pytest.mark.parametrize("constraint", ["x", 0, object()], ids=["text", "zero", "object"])
def test_what_is_no_constraint_is_refused_at_once(constraint):
    step = make_step()
    with pytest.raises(ArgumentTypeError, match=r"constraint is .*, accepted are None and objects"):
        step.add("a", [1], SamplingParams(), constraint)
    assert "a" not in step.blocks
    step.add("a", [1], SamplingParams())
    with pytest.raises(ArgumentTypeError, match="request 'b': constraint is"):
        step.fork("a", "b", SamplingParams(), constraint)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"banned_token_ids": tuple(range(W))}, rf"banned_token_ids \({W} ids\) ban all {W} ids"),
        (
            {"stop_token_ids": tuple(range(W)), "min_tokens": 3},
            rf"stop_token_ids \({W} ids\) until min_tokens=3, ban all {W} ids",
        ),
        (
            {
                "stop_token_ids": (3,),
                "banned_token_ids": (*range(3), *range(4, W)),
                "min_tokens": 1,
            },
            rf"banned_token_ids \({W - 1} ids\), with stop_token_ids \(1 ids\)",
        ),
    ],
    ids=["banned", "stops", "both"],
)
def test_parameters_that_leave_no_token_are_refused(params, message):
    step = make_step()
    with pytest.raises(ArgumentError, match=message):
        step.add("a", [1], SamplingParams(**params))
    assert "a" not in step.blocks
    step.add("a", [1], SamplingParams(stop_token_ids=tuple(range(W))))


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-18, "frequency_penalty": -1e24, "presence_penalty": -1e24},
        {"repetition_penalty": 1e18, "frequency_penalty": 1e24, "presence_penalty": 1e24},
        {"logit_bias": tuple((t, 1e24) for t in range(scripted.W)), "frequency_penalty": -1e24},
        {"min_tokens": 2**31 - 1, "stop_token_ids": (3,), "temperature": 1.0},
    ],
    ids=["least", "most", "bias", "min-tokens"],
)
def test_the_ends_of_what_is_accepted_disturb_nobody(params):
    step = scripted.make_step()
    step.add("a", [1, 2, 1], SamplingParams(seed=1, **params))
    step.add("b", [4, 5], SamplingParams())
    scripted.run(step)
    for _ in range(4):
        assert scripted.run(step, {"a": [1, 1], "b": [2]})["a"].new_tokens
