"""`RequestState`: what a request may bring, before anything is registered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specmla import ArgumentTypeError, SamplingParams
from tests.verify.test_step import make_step


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
