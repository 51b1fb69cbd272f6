"""EAGLE-3 heads of a grouped-query layer: drafts, reduced vocabulary, released files, refusals."""

from __future__ import annotations

import pytest
import torch

from drafters import Eagle3Drafter, GQAEagle3Drafter, GQAEagle3Model, load_eagle3, save_eagle3
from drafters.eagle3_config import Eagle3Config
from specmla import ArgumentError, CheckpointError, SamplingParams, SparseProbs, generate
from specmla.cli.drafts import drafter_from
from specmla.cli.run import run_loop
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.gqa_eagle3_network import (
    VARIANTS,
    gqa_eagle3_logits,
    llama_config,
    speculators_config,
    tensors_of,
    tiny_gqa_eagle3,
    write,
)
from tests.drafters.networks import VOCAB, tiny_target
from tests.e2e.conftest import make_step, prompts, run


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def checked_drafter(target, page_size: int = 4, qk_norm: bool = False, **flags: bool):
    """A drafter over poisoned pages, all of whose proposals are recomputed."""
    model = tiny_gqa_eagle3(target, qk_norm=qk_norm, **flags)
    drafter = GQAEagle3Drafter(target, model, num_pages=300, page_size=page_size)
    drafter.cache.rows.layer(0).fill_(float("nan"))
    checked, real, firsts = [0, 0], drafter.propose, dict[object, int]()
    tensors, layers = tensors_of(model), model.config.target_layer_ids

    def propose(requests):
        proposal, by_name = real(requests), {r.request_id: r for r in requests}
        probs = proposal.probs
        assert probs is None or isinstance(probs, SparseProbs)
        dense = None if probs is None else probs.dense(VOCAB)
        for i, (name, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True)):
            row, tokens = proposal.tokens[i].tolist(), list(by_name[name].tokens)
            for j in range(count):
                firsts[name] = first = drafter._log[name].first
                found = gqa_eagle3_logits(target, tensors, flags, layers, tokens, row[:j], first)
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


@pytest.mark.parametrize(
    ("variant", "page_size", "qk_norm"),
    [("plain", 1, False), ("residual", 16, False), ("carried", 5, True)],
)
def test_greedy_drafts_equal_those_without_a_cache(target, variant, page_size, qk_norm):
    drafter, checked, _ = checked_drafter(target, page_size, qk_norm, **VARIANTS[variant])
    plain, _ = run(target, prompts(5))
    tokens, history = run(target, prompts(5), drafter, 4, make_step(target, 4, num_pages=400))
    assert tokens == plain
    assert checked[0] > 200
    verified = [r for results in history for r in results if r.num_drafts]
    assert any(r.num_accepted < r.num_drafts for r in verified)
    assert drafter.cache.blocks.num_free == drafter.cache.blocks.num_pages


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampled_drafts_report_what_they_were_drawn_from(target, variant):
    drafter, checked, _ = checked_drafter(target, **VARIANTS[variant])
    sampling = [SamplingParams(0.8, seed=i, max_tokens=20) for i in range(4)]
    batch = {i: ([3 + i, 1, 4, 1 + i, 5], s) for i, s in enumerate(sampling)}
    step = make_step(target, 4, num_pages=400)
    results = [r for rs in generate(target, step, batch, drafter, 3) for r in rs]
    assert checked[1] > 60
    assert any(r.num_accepted > 0 for r in results)


def test_a_prefix_found_in_the_cache_is_not_read(target):
    drafter, checked, firsts = checked_drafter(target)
    step, params = make_step(target, 4, num_pages=400), SamplingParams(max_tokens=9)
    prompt = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 1]
    for name in ("a", "b"):
        for results in generate(target, step, {name: (prompt, params)}, drafter, 3):
            assert results
    assert firsts == {"a": 0, "b": 8}
    assert checked[0] > 20


def test_steps_that_were_not_drafted_for_are_caught_up_beside_prompts(target):
    """One request is behind by several rows while another one is new."""
    drafter, checked, _ = checked_drafter(target)
    step = make_step(target, 4, num_pages=400)
    wanted = iter([3, 0, 0, 2, 0, 4, 4, 1, 3, 3, 3, 3, 3, 3, 3])

    class Sometimes:
        vocab_size, hidden_layers = drafter.vocab_size, drafter.hidden_layers
        observe, reset = drafter.observe, drafter.reset

        def propose(self, requests):
            count = next(wanted)
            kept = {0: count, 1: max(0, 3 - count)}
            return drafter.propose(
                [r._replace(num_drafts=min(kept[r.request_id], r.num_drafts)) for r in requests]
            )

    batch = {i: ([3, 1, 4, 1, 5 + i], SamplingParams(max_tokens=11)) for i in range(2)}
    for _ in generate(target, step, batch, Sometimes(), 4):
        pass
    assert checked[0] > 20


def test_only_known_ids_are_drafted(target):
    """A head of one id drafts nothing else, and verify still gives plain text."""
    model = tiny_gqa_eagle3(target, draft_vocab=1)
    assert model.target_ids.tolist() != [0]
    drafter = GQAEagle3Drafter(target, model, num_pages=90, page_size=8)
    seen, real = set(), drafter.propose

    def propose(requests):
        given = real(requests)
        seen.update(given.tokens[given.tokens >= 0].tolist())
        return given

    drafter.propose = propose
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, seed=3, max_tokens=9)
        step = make_step(target, 4, num_pages=90)
        for _ in generate(target, step, {0: ([3, 1, 4], params)}, drafter, 3):
            pass
    assert seen == set(model.target_ids.tolist())


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_as_released_by_speculators(target, tmp_path, variant):
    """`layers.0`, an embedding beside it, the layer's config by itself, d2t and t2d."""
    flags = VARIANTS[variant]
    model = tiny_gqa_eagle3(target, qk_norm=variant == "carried", **flags)
    tensors = tensors_of(model, "layers.0")
    copy = target.model.embed_tokens.weight.clone()
    write(tmp_path, speculators_config(model), tensors | {"embed_tokens.weight": copy})
    check_loaded(target, tmp_path, model, flags)


def test_flat_files_of_a_llama_layer(target, tmp_path):
    """`midlayer`, a model type that is the target's, layers in their own section."""
    model = tiny_gqa_eagle3(target)
    write(tmp_path, llama_config(model), tensors_of(model))
    check_loaded(target, tmp_path, model, {})


def check_loaded(target, folder, model, flags) -> None:
    """What a directory gives drafts as the tensors say, and loses nothing."""
    again = load_eagle3(folder, target)
    assert isinstance(again, GQAEagle3Model)
    assert again.config == model.config
    assert torch.equal(again.d2t, model.d2t)
    for name, value in model.state_dict().items():
        got = dict(again.state_dict())
        assert torch.equal(got.get(name, got.get(name.replace("midlayer", "layers.0"))), value)
    make = drafter_from(folder, target, num_requests=1, longest=40)
    drafter = make(make_step(target, 4, num_pages=40))
    assert type(drafter) is GQAEagle3Drafter
    drafted = run_loop(target, [[3, 1, 4]], [SamplingParams(max_tokens=12)], make)
    plain = run_loop(target, [[3, 1, 4]], [SamplingParams(max_tokens=12)])
    assert drafted.tokens == plain.tokens
    assert drafted.stats.num_draft_tokens > 10
    step, seen = make_step(target, 4, num_pages=40), []
    real, drafter_ = drafter.propose, drafter

    def propose(requests):
        given = real(requests)
        seen.extend(zip([list(r.tokens) for r in requests], given.tokens.tolist(), strict=True))
        return given

    drafter_.propose = propose
    for _ in generate(target, step, {0: ([3, 1, 4], SamplingParams(max_tokens=9))}, drafter_, 3):
        pass
    tensors = tensors_of(model)
    for tokens, row in seen:
        for j, token in enumerate(t for t in row if t >= 0):
            found = gqa_eagle3_logits(
                target, tensors, flags, model.config.target_layer_ids, tokens, row[:j]
            )
            top = found.topk(2).values
            assert token == int(found.argmax()) or top[0] - top[1] < 1e-3
    assert len(seen) > 4


def test_our_own_files(target, tmp_path):
    model = tiny_gqa_eagle3(target, qk_norm=True, norm_before_residual=True, fc_norm=True)
    save_eagle3(model, tmp_path)
    check_loaded(target, tmp_path, model, {"norm_before_residual": True, "fc_norm": True})


def test_layers_are_counted_as_each_format_does(target):
    """At the top: before which. In the section: whose outputs. Neither: those of the paper."""
    model = tiny_gqa_eagle3(target)
    flat = llama_config(model)
    assert Eagle3Config.from_hf(flat).target_layer_ids == (0, 1, 2)
    top = {k: v for k, v in flat.items() if k != "eagle_config"}
    given = top | {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    assert Eagle3Config.from_hf(given).target_layer_ids == (1, 29, 57)
    assert Eagle3Config.from_hf(top, 61).target_layer_ids == (1, 29, 57)
    silent = speculators_config(model, eagle_aux_hidden_state_layer_ids=None)
    assert Eagle3Config.from_hf(silent, 27).target_layer_ids == (1, 12, 23)
    with pytest.raises(ArgumentError, match="eagle_aux_hidden_state_layer_ids is missing"):
        Eagle3Config.from_hf(top, 5)


def test_scaled_positions_are_read_and_written(target, tmp_path):
    """YaRN as flat files for DeepSeek targets have it: the layer turns as it says."""
    model = tiny_gqa_eagle3(target)
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    given = llama_config(model, rope_scaling=scaling | {"original_max_position_embeddings": 4096})
    write(tmp_path / "flat", given, tensors_of(model))
    loaded = load_eagle3(tmp_path / "flat", target)
    found = loaded.config.attention.rope_scaling
    assert (found.factor, found.original_max_position_embeddings) == (40.0, 4096)
    turned = loaded.rotary.at(torch.arange(9), torch.float32)
    assert not torch.equal(turned.cos, model.rotary.at(torch.arange(9), torch.float32).cos)
    save_eagle3(loaded, tmp_path / "own")
    assert load_eagle3(tmp_path / "own", target).config == loaded.config


def test_either_map_is_enough_and_none_is_not(target, tmp_path):
    model = tiny_gqa_eagle3(target)
    tensors = tensors_of(model)
    for left_out in ("d2t", "t2d"):
        kept = {k: v for k, v in tensors.items() if k != left_out}
        write(tmp_path / left_out, llama_config(model), kept)
        assert torch.equal(load_eagle3(tmp_path / left_out, target).d2t, model.d2t)
    bare = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    write(tmp_path / "none", llama_config(model), bare)
    with pytest.raises(CheckpointError, match="d2t and t2d are missing"):
        load_eagle3(tmp_path / "none", target)
    whole = tiny_gqa_eagle3(target, draft_vocab=VOCAB)
    bare = {k: v for k, v in tensors_of(whole).items() if k not in ("d2t", "t2d")}
    write(tmp_path / "whole", llama_config(whole), bare)
    assert load_eagle3(tmp_path / "whole", target).target_ids.tolist() == list(range(VOCAB))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {"d2t": t["d2t"] * 0 - 1}, "d2t has 40 entries of torch.int64"),
        (lambda t: {"d2t": t["d2t"][:-1]}, "d2t has 39 entries"),
        (lambda t: {"d2t": t["d2t"].float()}, "d2t has 40 entries of torch.float32"),
        (lambda t: {"d2t": t["d2t"] + 2**40}, "different ids below 61"),
        (lambda t: {"t2d": t["t2d"][:-1]}, "ids, accepted are 40 of 61"),
        (lambda t: {"t2d": ~t["t2d"]}, "t2d names 21 of 61 ids, accepted are 40 of 61"),
        (lambda t: {"t2d": t["t2d"].roll(1)}, "t2d names other ids than d2t gives"),
        (lambda t: {"lm_head.weight": t["lm_head.weight"][:-1]}, "of another shape: lm_head"),
    ],
)
def test_maps_that_do_not_fit_are_refused(target, tmp_path, change, reason):
    model = tiny_gqa_eagle3(target)
    tensors = tensors_of(model)
    write(tmp_path, llama_config(model), tensors | change(tensors))
    with pytest.raises(CheckpointError, match=reason):
        load_eagle3(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        ({"draft_vocab_size": None}, "draft_vocab_size is missing"),
        ({"draft_vocab_size": 99}, r"draft_vocab_size is 99, accepted are 1 \.\. 61"),
        ({"norm_output": "yes"}, "norm_output is 'yes', accepted are true, false"),
        ({"norm_before_fc": True, "fc_norm": True}, "accepted is one of them"),
        ({"embed_requires_grad": True}, "embed_requires_grad is True, accepted is False"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48, accepted is 32"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "accepted are different layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "accepted are different layers"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "accepted is a list of integers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"target_layer_ids has \[8\]"),
    ],
)
def test_what_of_speculators_is_not_served_is_refused_by_name(target, tmp_path, changes, reason):
    model = tiny_gqa_eagle3(target)
    write(tmp_path, speculators_config(model, **changes), tensors_of(model, "layers.0"))
    with pytest.raises(CheckpointError, match=reason):
        load_eagle3(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, accepted is 1"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 6, accepted are multiples"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\], accepted is an object"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"vocab_size": 7}, "draft_vocab_size is 40, accepted are 1 .. 7"),
    ],
)
def test_what_of_flat_files_is_not_served_is_refused_by_name(target, tmp_path, changes, reason):
    model = tiny_gqa_eagle3(target)
    write(tmp_path, llama_config(model, **changes), tensors_of(model))
    with pytest.raises(CheckpointError, match=reason):
        load_eagle3(tmp_path, target)


def test_heads_of_the_other_kind_are_refused(target):
    with pytest.raises(ArgumentError, match="draft is a Eagle3Model"):
        GQAEagle3Drafter(target, tiny_eagle3(target), num_pages=9)
    with pytest.raises(ArgumentError, match="backend is 'triton', accepted is None"):
        GQAEagle3Drafter(target, tiny_gqa_eagle3(target), num_pages=9, backend="triton")
    with pytest.raises(ArgumentError, match="attention is grouped-query"):
        Eagle3Drafter(target, tiny_gqa_eagle3(target), num_pages=9)


def test_an_embedding_that_is_not_the_targets_is_refused(target, tmp_path):
    """Some heads come with a copy of it; another one would be passed over in silence."""
    model = tiny_gqa_eagle3(target)
    tensors = tensors_of(model)
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    write(tmp_path, llama_config(model), tensors)
    assert isinstance(load_eagle3(tmp_path, target), GQAEagle3Model)
    tensors["embed_tokens.weight"][3, 2] += 0.5
    write(tmp_path, llama_config(model), tensors)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not the target's"):
        load_eagle3(tmp_path, target)
