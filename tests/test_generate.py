"""`generate` leaves a usable step behind when something goes wrong in its middle."""

from __future__ import annotations

import pytest

from specmla import ArgumentError, SamplingParams, generate
from tests.e2e.conftest import make_step, prompts, run
from tests.e2e.conftest import model as model


def fail(*_):
    raise OSError("out of luck")


def test_a_failed_forward_leaves_no_request_and_no_page(model, monkeypatch):
    plain, _ = run(model, prompts(3, 6))
    step = make_step(model)
    loop = generate(model, step, prompts(3, 6))
    next(loop)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "logits", fail)
        with pytest.raises(OSError, match="out of luck"):
            next(loop)
    step.blocks.check_integrity()
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages
    tokens, _ = run(model, prompts(3, 6), None, 4, step)
    assert tokens == plain


def test_a_refused_prompt_adds_none(model):
    step = make_step(model)
    batch = {"good": ([1, 2], SamplingParams()), "bad": ([], SamplingParams())}
    with pytest.raises(ArgumentError, match="'bad': prompt has 0 tokens"):
        next(generate(model, step, batch))
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages
