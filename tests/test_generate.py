"""`generate` leaves a usable step behind when something goes wrong in its middle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters import DraftModelDrafter, NgramDrafter
from specmla import (
    FINAL,
    ArgumentError,
    BatchRules,
    PrefillWorkspace,
    SamplingParams,
    generate,
)
from specmla.bucket import Bucket
from specmla.verify.captured_buckets import doubling_buckets
from specmla.verify.captured_plan import CapturedPlan
from tests.e2e.conftest import VOCAB, ScriptedDrafter, make_step, prompts, run
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


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["none", "ngram", "model"])
def test_captured_steps_give_the_same_tokens(model, name, temperature, monkeypatch):
    """Only the step with the prompts is laid out anew; requests end one after another."""
    drafters = {
        "none": lambda: None,
        "ngram": lambda: NgramDrafter(VOCAB, prompt_lookup_min=1),
        "model": lambda: DraftModelDrafter(model, num_pages=200, page_size=4),
    }
    given = {
        key: (tokens, dataclasses.replace(sampling, max_tokens=8 + 5 * i))
        for i, (key, (tokens, sampling)) in enumerate(
            prompts(3, temperature=temperature, top_p=0.9).items()
        )
    }
    plain, _ = run(model, given, drafters[name]())
    step, eager = make_step(model), []
    real = step.lay_out
    monkeypatch.setattr(step, "lay_out", lambda *args: eager.append(1) or real(*args))
    tokens = {key: [] for key in given}
    for results in generate(model, step, given, drafters[name](), graphs=True):
        for r in results:
            tokens[r.request_id] += r.new_tokens
    assert tokens == plain
    assert len(eager) == 1
    assert step.blocks.num_free == step.blocks.num_pages


def test_own_buckets_leave_larger_steps_eager(model):
    given = prompts(3, 12)
    plain, _ = run(model, given)
    step, sizes = make_step(model), []
    real = CapturedPlan.for_replay

    def count(self, planned, *args):
        sizes.append(len(planned))
        return real(self, planned, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedPlan, "for_replay", count)
        tokens = {key: [] for key in given}
        for results in generate(model, step, given, graphs=[Bucket(2, 1)]):
            for r in results:
                tokens[r.request_id] += r.new_tokens
    assert tokens == plain
    assert set(sizes) <= {1, 2}


def test_doubling_buckets_reach_the_batch():
    found = [(b.num_requests, b.query_len) for b in doubling_buckets(5, 3)]
    assert found == [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1), (4, 3), (5, 1), (5, 3)]
    assert [b.num_requests for b in doubling_buckets(1, 1)] == [1]
    assert not any(b.ragged for b in doubling_buckets(8, 2, ragged=False))
    with pytest.raises(ArgumentError, match="num_requests is 0"):
        doubling_buckets(0, 3)


def test_drafters_hear_the_same_hidden_states_from_captured_steps(model):
    """Rows of padding are left out; states of an earlier step are not overwritten."""
    heard = []
    for graphs in (False, True):
        drafter = Listener(lambda tokens, n: [(tokens[-1] * 3 + i) % VOCAB for i in range(n)])
        step = make_step(model)
        for _ in generate(model, step, prompts(3, 10), drafter, 3, graphs=graphs):
            pass
        heard.append(drafter.heard)
    assert len(heard[0]) == len(heard[1])
    for plain, captured in zip(*heard, strict=True):
        assert captured.starts == plain.starts
        assert captured.counts == plain.counts
        assert torch.allclose(captured.states, plain.states, atol=1e-4)


class Listener(ScriptedDrafter):
    hidden_layers = (0, FINAL)

    def __init__(self, script):
        super().__init__(script)
        self.heard = []

    def observe(self, results, hidden=None):
        self.heard.append(hidden)
