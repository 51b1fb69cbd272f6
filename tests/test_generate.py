"""`generate` leaves a usable step behind when something goes wrong in its middle."""

from __future__ import annotations

import pytest

from specmla import ArgumentError, BatchRules, PrefillWorkspace, SamplingParams, generate
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


@pytest.mark.parametrize("rows", [4, 12])
def test_long_shared_prefixes_in_chunks_give_the_same_tokens(model, rows):
    """The second batch finds its prefixes in the cache: prompts of few rows over much context."""
    given = {i: ([*range(2, 50), i, i, i], SamplingParams()) for i in range(3)}
    plain, _ = run(model, given)
    step = make_step(model)
    assert step.builder.rules.workspace.num_rows == 800, "what the pool has"
    workspace = PrefillWorkspace(step.cache.width, 4, step.cache.dtype, "cpu")
    workspace.claim(rows)
    workspace.lock()
    step.builder.configure(BatchRules(workspace=workspace))
    chunks, real = [], step.builder.build

    def build(*args, **kwargs):
        metadata = real(*args, **kwargs)
        if metadata.prefill is not None:
            chunks.append(len(metadata.prefill.context))
        return metadata

    step.builder.build = build
    for _ in range(2):
        tokens, _ = run(model, given, None, 4, step)
        assert tokens == plain
    assert max(chunks) >= 3 * 48 // rows - 1
