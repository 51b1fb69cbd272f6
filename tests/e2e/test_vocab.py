"""Vocabularies of different sizes (BL-51): refused, or allowed and still lossless."""

from __future__ import annotations

import pytest

from specmla import ArgumentError, SamplingParams
from tests.e2e.conftest import VOCAB, ScriptedDrafter, make_step, prompts, run


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 8])
def test_another_vocabulary_is_refused_before_anything_runs(model, size):
    step = make_step(model)
    drafter = ScriptedDrafter(lambda t, k: [0] * k, vocab_size=size)
    with pytest.raises(ArgumentError, match=f"{size}.*{VOCAB}"):
        run(model, prompts(2), drafter, 4, step)
    assert step.active == ()


def test_allowed_ids_outside_the_target_are_never_emitted(model):
    plain, _ = run(model, prompts(3))
    step = make_step(model, allow_vocab_mismatch=True)
    drafter = ScriptedDrafter(lambda t, k: [VOCAB + 3] * k, vocab_size=VOCAB + 8)
    tokens, history = run(model, prompts(3), drafter, 4, step)
    assert tokens == plain
    assert all(r.num_accepted == 0 for results in history for r in results)


def test_sampled_ids_outside_the_target_are_never_emitted(model):
    step = make_step(model, allow_vocab_mismatch=True)
    drafter = ScriptedDrafter(lambda t, k: [VOCAB + 3, 1], vocab_size=VOCAB + 8)
    batch = {"a": ([1, 2], SamplingParams(temperature=1.0, max_tokens=40))}
    tokens, _ = run(model, batch, drafter, 4, step)
    assert all(0 <= t < VOCAB for t in tokens["a"])
