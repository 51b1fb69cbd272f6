"""EAGLE-3: drafts equal those without a cache, q is that of the reduced vocabulary, files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import Eagle3Drafter, load_eagle3, save_eagle3
from drafters.eagle3_config import ARCHITECTURE, Eagle3Config
from specmla import (
    ArgumentError,
    CheckpointError,
    DeepseekForCausalLM,
    SamplingParams,
    SparseProbs,
    generate,
)
from specmla.cli.drafts import drafter_from
from tests.drafters.eagle3_network import eagle3_logits, tiny_eagle3
from tests.drafters.networks import VOCAB, tiny_target
from tests.e2e.conftest import make_step, prompts, run


@pytest.fixture(scope="module")
def target() -> DeepseekForCausalLM:
    return tiny_target()


def make(target, page_size: int = 4):
    """A drafter whose proposals are all compared with logits recomputed from nothing."""
    model = tiny_eagle3(target)
    drafter = Eagle3Drafter(target, model, num_pages=300, page_size=page_size, backend="reference")
    drafter.cache.rows.layer(0).fill_(float("nan"))
    checked, real, firsts = [0, 0], drafter.propose, dict[object, int]()

    def propose(requests):
        proposal = real(requests)
        by_name = {r.request_id: r for r in requests}
        probs = proposal.probs
        assert probs is None or isinstance(probs, SparseProbs)
        dense = None if probs is None else probs.dense(VOCAB)
        for i, (name, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True)):
            row, tokens = proposal.tokens[i].tolist(), list(by_name[name].tokens)
            for j in range(count):
                first = firsts.get(name, 0)
                found = eagle3_logits(target, model, tokens, row[:j], first)
                checked[0] += 1
                if dense is None:
                    top = found.topk(2).values
                    assert row[j] == int(found.argmax()) or top[0] - top[1] < 1e-3
                else:
                    want = (found / by_name[name].sampling.temperature).softmax(-1)
                    torch.testing.assert_close(dense[i, j], want, atol=2e-4, rtol=2e-3)
                    checked[1] += 1
        return proposal

    drafter.propose = propose
    return drafter, checked, firsts


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_drafts_equal_those_without_a_cache(target, page_size):
    drafter, checked, _ = make(target, page_size)
    plain, _ = run(target, prompts(5))
    tokens, history = run(target, prompts(5), drafter, 4, make_step(target, 4, num_pages=400))
    assert tokens == plain
    assert checked[0] > 200
    verified = [r for results in history for r in results if r.num_drafts]
    assert any(r.num_accepted < r.num_drafts for r in verified)
    assert drafter.cache.blocks.num_free == drafter.cache.blocks.num_pages


def test_sampled_drafts_report_what_they_were_drawn_from(target):
    drafter, checked, _ = make(target)
    sampling = [SamplingParams(0.8, seed=i, max_tokens=20) for i in range(4)]
    batch = {i: ([3 + i, 1, 4, 1 + i, 5], s) for i, s in enumerate(sampling)}
    step = make_step(target, 4, num_pages=400)
    results = [r for rs in generate(target, step, batch, drafter, 3) for r in rs]
    assert checked[1] > 60
    assert any(r.num_accepted > 0 for r in results)


def test_a_prefix_found_in_the_cache_is_not_read(target):
    """The second request's states begin behind the shared pages, and so does its run."""
    drafter, checked, firsts = make(target)
    step = make_step(target, 4, num_pages=400)
    prompt = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 1]
    params = SamplingParams(max_tokens=9)
    for name in ("a", "b"):
        for results in generate(target, step, {name: (prompt, params)}, drafter, 3):
            assert results
            if name not in firsts and name == "b":
                firsts[name] = drafter._log["b"].first
    assert firsts["b"] == 8
    assert checked[0] > 10


def test_steps_that_were_not_drafted_for_are_caught_up(target):
    drafter, checked, _ = make(target)
    step = make_step(target, 4, num_pages=400)
    wanted = iter([3, 0, 0, 2, 0, 4, 4, 1, 3, 3, 3, 3, 3])

    class Sometimes:
        vocab_size, hidden_layers = drafter.vocab_size, drafter.hidden_layers
        observe, reset = drafter.observe, drafter.reset

        def propose(self, requests):
            count = next(wanted)
            return drafter.propose(
                [r._replace(num_drafts=min(count, r.num_drafts)) for r in requests]
            )

    params = SamplingParams(max_tokens=11)
    for _ in generate(target, step, {0: ([3, 1, 4, 1, 5], params)}, Sometimes(), 4):
        pass
    assert checked[0] > 12


def test_files(target, tmp_path):
    model = tiny_eagle3(target)
    save_eagle3(model, tmp_path)
    again = load_eagle3(tmp_path, target)
    assert again.config == model.config
    assert torch.equal(again.d2t, model.d2t)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    stored = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "d2t", "t2d"} < set(
        stored
    )
    assert stored["t2d"].nonzero()[:, 0].tolist() == model.target_ids.tolist()
    halved = load_eagle3(tmp_path, target, torch.bfloat16)
    assert torch.equal(halved.d2t, model.d2t)
    step = make_step(target, 4, num_pages=40, num_draft_layers=1)
    made = drafter_from(tmp_path, target, num_requests=2, longest=40)(step)
    assert isinstance(made, Eagle3Drafter)
    with pytest.raises(ArgumentError, match="chains only"):
        drafter_from(tmp_path, target, num_requests=2, longest=40, tree=True)
    save_file(stored | {"d2t": stored["d2t"] * 0 - 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t has 40 entries"):
        load_eagle3(tmp_path, target)


def test_what_is_not_served_is_refused_by_name(target, tmp_path):
    save_eagle3(tiny_eagle3(target), tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    assert good["architectures"] == [ARCHITECTURE]
    assert good["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    bad = good | {"architectures": ["LlamaForCausalLMEagle"], "norm_before_residual": "yes"}
    path.write_text(json.dumps({k: v for k, v in bad.items() if k != "draft_vocab_size"}))
    with pytest.raises(CheckpointError) as refused:
        load_eagle3(tmp_path, target)
    for word in ("'LlamaForCausalLMEagle'", "norm_before_residual", "draft_vocab_size is missing"):
        assert word in str(refused.value)
    path.write_text(json.dumps(good | {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}))
    with pytest.raises(CheckpointError, match=r"target_layer_ids has \[8\]"):
        load_eagle3(tmp_path, target)
    with pytest.raises(ArgumentError, match=r"draft_vocab_size is 99, accepted are 1 \.\. 61"):
        Eagle3Config(tiny_eagle3(target).config.attention, 8, 61, 99, (0, 1, 2))
