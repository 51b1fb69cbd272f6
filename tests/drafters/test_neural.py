"""Drafters on hidden states: every draft equals one recomputed without a cache, whatever was
accepted before it."""

from __future__ import annotations

import dataclasses
import json
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import (
    DFlashDrafter,
    DSparkDrafter,
    MTPDrafter,
    load_block_model,
    save_block_model,
)
from specmla import (
    FINAL,
    ArgumentError,
    CheckpointError,
    DeepseekForCausalLM,
    SamplingParams,
    YarnScaling,
    generate,
    load_checkpoint,
    load_mtp,
    save_checkpoint,
    save_part,
)
from tests.drafters.networks import (
    VOCAB,
    block_logits,
    mtp_logits,
    target_states,
    tiny_block,
    tiny_mtp,
    tiny_target,
)
from tests.e2e.conftest import ScriptedDrafter, make_step, prompts, run

KINDS = ("mtp", "dflash", "dspark")


@pytest.fixture(scope="module")
def target() -> DeepseekForCausalLM:
    return tiny_target()


def make(target, kind: str, page_size: int = 4, **step_options):
    """A drafter, its step and the function that recomputes a draft's logits."""
    step = make_step(target, page_size, num_pages=400, num_draft_layers=1, **step_options)
    step.cache.layer(target.config.num_layers).fill_(float("nan"))
    if kind == "mtp":
        module = tiny_mtp(target)
        logits = lambda *args: mtp_logits(target, module, *args)  # noqa: E731
        return MTPDrafter(target, module, step), step, logits
    draft = tiny_block(target, kind)
    made = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}[kind]
    drafter = made(target, draft, num_pages=300, page_size=page_size + 1, backend="reference")
    for layer in range(draft.config.num_layers):
        drafter.cache.rows.layer(layer).fill_(float("nan"))
    return drafter, step, lambda *args: block_logits(target, draft, *args)


def check(drafter, logits, firsts=None) -> list[int]:
    """Compare every proposal with logits recomputed from nothing; count them in the result."""
    checked, real = [0, 0], drafter.propose

    def propose(requests):
        proposal = real(requests)
        assert sorted(proposal.request_ids) == sorted(r.request_id for r in requests)
        by_name = {r.request_id: r for r in requests}
        for i, (name, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True)):
            row, tokens = proposal.tokens[i].tolist(), list(by_name[name].tokens)
            assert row[count:] == [-1] * (len(row) - count)
            for j in range(count):
                first = firsts(name) if firsts else 0
                found = logits(tokens, row[:j], first)
                checked[0] += 1
                if proposal.probs is None:
                    top = found.topk(2).values
                    assert row[j] == int(found.argmax()) or top[0] - top[1] < 1e-3
                else:
                    temperature = by_name[name].sampling.temperature
                    expected = (found / temperature).softmax(-1)
                    torch.testing.assert_close(proposal.probs[i, j], expected, atol=2e-4, rtol=2e-3)
                    checked[1] += 1
        return proposal

    drafter.propose = propose
    return checked


def pages_are_back(drafter) -> bool:
    cache = getattr(drafter, "cache", None)
    return cache is None or cache.blocks.num_free == cache.blocks.num_pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_equal_those_without_a_cache(target, kind, page_size):
    drafter, step, logits = make(target, kind, page_size)
    checked = check(drafter, logits)
    plain, _ = run(target, prompts(6))
    tokens, history = run(target, prompts(6), drafter, 4, step)
    assert tokens == plain
    assert checked[0] > 300
    verified = [r for results in history for r in results if r.num_drafts]
    assert any(r.num_accepted < r.num_drafts for r in verified)
    assert pages_are_back(drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_drafts_report_what_they_were_drawn_from(target, kind):
    drafter, step, logits = make(target, kind)
    checked = check(drafter, logits)
    run(target, prompts(4, temperature=0.8), drafter, 3, step)
    assert checked[1] > 100
    assert pages_are_back(drafter)


class Oracle:
    """Replaces drafts by the tokens that will be accepted, so that histories vary."""

    def __init__(self, drafter, plain: dict, accept) -> None:
        self.drafter, self.plain, self.accept = drafter, plain, accept
        self.vocab_size, self.hidden_layers = drafter.vocab_size, drafter.hidden_layers

    def propose(self, requests):
        proposal = self.drafter.propose(requests)
        tokens = proposal.tokens.clone()
        start = {r.request_id: len(r.tokens) for r in requests}
        for i, name in enumerate(proposal.request_ids):
            sequence = self.plain[name]
            for j in range(proposal.counts[i]):
                at = start[name] + j
                right = sequence[at] if at < len(sequence) else 0
                keep = j < self.accept(name, start[name])
                tokens[i, j] = right if keep else (right + 1) % VOCAB
        return type(proposal)(proposal.request_ids, proposal.counts, tokens)

    def observe(self, results, hidden=None):
        self.drafter.observe(results, hidden)

    def reset(self, request_id):
        self.drafter.reset(request_id)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_right_after_any_history_of_acceptances(target, kind):
    batch = prompts(6)
    plain, _ = run(target, batch)
    whole = {name: [*given, *plain[name]] for name, (given, _) in batch.items()}
    drafter, step, logits = make(target, kind)
    checked = check(drafter, logits)
    oracle = Oracle(drafter, whole, lambda name, at: Random(f"{name}{at}").randrange(5))
    tokens, history = run(
        target, batch, oracle, {f"r{i}": (4, 4, 3, 4, 1, 4)[i] for i in range(6)}, step
    )
    assert tokens == plain
    accepted = {(r.num_drafts, r.num_accepted) for results in history for r in results}
    assert {(4, n) for n in range(5)} | {(1, 0), (1, 1)} <= accepted
    assert checked[0] > 120


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_found_in_the_cache_has_no_states_and_is_not_read(target, kind):
    """The second batch shares full pages with the first; its context begins behind them."""
    drafter, step, logits = make(target, kind)
    shared = [5, 9, 2, 7, 1, 1, 8, 3, 3, 20, 4]
    run(target, {"a": ([*shared, 30, 31], SamplingParams(max_tokens=9))}, drafter, 3, step)
    batch = {
        name: ([*shared, i], SamplingParams(max_tokens=12)) for i, name in enumerate(("b", "c"))
    }
    plain, _ = run(target, batch)
    checked = check(drafter, logits, firsts=lambda name: 8)
    tokens, _ = run(target, batch, drafter, 3, step)
    assert tokens == plain
    assert checked[0] > 20
    assert pages_are_back(drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_drafts_in_between(target, kind):
    drafter, step, logits = make(target, kind)
    checked, turn = check(drafter, logits), iter(range(10_000))
    plain, _ = run(target, prompts(6))
    inner, drafter.propose = (
        drafter.propose,
        lambda requests: inner([r for r in requests if next(turn) % 3 == 0]),
    )
    tokens, _ = run(target, prompts(6), drafter, 4, step)
    assert tokens == plain
    assert checked[0] > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_request_is_the_same_alone_and_in_a_batch(target, kind):
    batch = prompts(6, temperature=1.0)
    drafter, step, _ = make(target, kind)
    together, _ = run(target, batch, drafter, 3, step)
    for name in ("r1", "r4"):
        drafter, step, _ = make(target, kind)
        alone, _ = run(target, {name: batch[name]}, drafter, 3, step)
        assert alone[name] == together[name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_loop_gives_all_pages_back(target, kind):
    drafter, step, _ = make(target, kind)
    loop = generate(target, step, prompts(3), drafter, 3)
    for _ in range(3):
        next(loop)
    loop.close()
    step.blocks.check_integrity()
    assert step.blocks.num_free == step.blocks.num_pages
    assert pages_are_back(drafter)


def test_dspark_ends_a_block_before_the_product_of_confidences_falls_below(target):
    draft = tiny_block(target, "dspark")
    made = [
        DSparkDrafter(target, draft, num_pages=300, backend="reference", min_confidence=least)
        for least in (0.0, 0.4)
    ]
    proposals = []
    for drafter in made:
        step = make_step(target)
        loop = generate(target, step, prompts(4, temperature=1.0), drafter, 5)
        real = drafter.propose
        drafter.propose = lambda requests, real=real: (
            proposals.append(real(requests)) or proposals[-1]
        )
        next(loop), next(loop)
        loop.close()
    full, cut = (p for p in proposals if p.tokens.shape[1])
    confidence = made[0].confidences.cumprod(-1)
    kept = (confidence >= 0.4).long().cumprod(-1).bool()
    assert kept.any()
    assert not kept.all()
    assert torch.equal(cut.tokens, full.tokens.masked_fill(~kept, -1))


def test_dspark_configs_survive_their_files(target, tmp_path):
    attention = dataclasses.replace(
        target.config.attention, rope_scaling=YarnScaling(4.0, 64), q_lora_rank=8
    )
    for kind in ("dflash", "dspark"):
        draft = tiny_block(target, kind, attention=attention)
        save_block_model(draft, tmp_path / kind)
        loaded = load_block_model(tmp_path / kind, target)
        assert loaded.config == draft.config
        for name, value in draft.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)


def test_what_a_block_checkpoint_is_not_served_for_is_named(target, tmp_path):
    save_block_model(tiny_block(target, "dspark"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["DominoDraftModel"]
    config["dflash_config"] |= {"attention_mode": "gqa", "markov_head_type": "rnn"}
    del config["dflash_config"]["block_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_block_model(tmp_path, target)
    for text in ("DominoDraftModel", "'gqa'", "'rnn'", "block_size is missing"):
        assert text in str(caught.value)
    other = tiny_target(layers=2)
    save_block_model(tiny_block(target, "dspark"), tmp_path)
    with pytest.raises(CheckpointError, match=r"target_layer_ids has \[2\]"):
        load_block_model(tmp_path, other)


def test_mtp_loads_from_a_whole_checkpoint_and_from_its_own_folder(target, tmp_path):
    module, prefix = tiny_mtp(target), f"model.layers.{target.config.num_layers}."
    save_part(module, tmp_path / "own", target.config.to_hf(), prefix)
    save_checkpoint(target, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    tensors |= {prefix + name: value for name, value in module.state_dict().items()}
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 0
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"] + 0
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    for folder in ("own", "whole"):
        loaded = load_mtp(tmp_path / folder, target)
        for name, value in module.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)
    assert load_checkpoint(tmp_path / "whole")[0].state_dict().keys() == target.state_dict().keys()
    del tensors[f"{prefix}eh_proj.weight"]
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        load_mtp(tmp_path / "whole", target)


def test_an_mtp_drafter_needs_its_layer_of_the_pool(target):
    with pytest.raises(ArgumentError, match="num_draft_layers=1"):
        MTPDrafter(target, tiny_mtp(target), make_step(target))


def test_drafters_that_ask_for_nothing_get_nothing(target):
    class Plain(ScriptedDrafter):
        def observe(self, results, hidden=None):
            assert hidden is None
            super().observe(results)

    run(target, prompts(2), Plain(lambda tokens, count: [1] * count))


@pytest.mark.parametrize("layers", [(FINAL,), (2, 0, FINAL)])
def test_states_are_those_of_the_committed_rows(target, layers):
    """Of prompts, of anchors and of accepted drafts, none of what was rejected."""
    batch = prompts(6)
    plain, _ = run(target, batch)
    whole = {name: [*given, *plain[name]] for name, (given, _) in batch.items()}
    wanted = {name: target_states(target, tokens, layers) for name, tokens in whole.items()}
    seen = dict.fromkeys(batch, 0)

    class Watching(ScriptedDrafter):
        hidden_layers = layers

        def observe(self, results, hidden=None):
            parts = hidden.states.split(list(hidden.counts))
            for result, start, states in zip(results, hidden.starts, parts, strict=True):
                name = result.request_id
                assert start == seen[name]
                seen[name] += len(states)
                torch.testing.assert_close(
                    states, wanted[name][start : seen[name]], atol=1e-4, rtol=1e-3
                )

    def script(tokens, count):
        known = next(w for w in whole.values() if w[: len(tokens)] == tokens)[len(tokens) :]
        right = len(tokens) % 5
        return [*known[:right], *[0] * count][:count]

    run(target, batch, Watching(script))
    assert seen == {name: len(tokens) - 1 for name, tokens in whole.items()}
