"""Block drafters of grouped-query layers: drafts equal those without a cache, files, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import (
    BlockDraftModel,
    DDTreeDrafter,
    DFlashDrafter,
    GQABlockModel,
    GQADFlashDrafter,
    GQADSparkDrafter,
    load_block_model,
    save_block_model,
)
from drafters.block_config import BlockConfig
from drafters.gqa_config import GQAConfig
from specmla import ArgumentError, CheckpointError, SamplingParams, generate
from specmla.cli.drafts import drafter_from
from specmla.testing import check_drafter
from tests.drafters.networks import VOCAB, randomise, target_states, tiny_block, tiny_target
from tests.e2e.conftest import make_step, prompts, run

MADE = {"dflash": GQADFlashDrafter, "dspark": GQADSparkDrafter}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def tiny_gqa(
    target, kind: str, qk_norm: bool = True, draft_vocab: int | None = None
) -> GQABlockModel:
    """Six query heads over two key heads, wider together than the hidden states."""
    dims = GQAConfig(target.config.attention.hidden_size, 6, 2, 8, qk_norm=qk_norm)
    config = BlockConfig(
        attention=dims,
        num_layers=2,
        intermediate_size=40,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(0, 2),
        sample_from_anchor=kind == "dspark",
        markov_rank=6 if kind == "dspark" else 0,
        confidence_head=kind == "dspark",
        architecture="DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel",
        draft_vocab_size=draft_vocab,
    )
    model = GQABlockModel(config)
    randomise(model, 9)
    if draft_vocab is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:draft_vocab].sort()
        model.d2t.copy_(ids.values - torch.arange(draft_vocab))
    return model.eval()


def rotated(x, positions, theta=10000.0):
    """Rotate halves [n, heads, d] by hand, in float64."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None, None] * frequency
    a, b = x.double()[..., :half], x.double()[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@torch.no_grad()
def gqa_logits(
    target, draft, tokens: list[int], drafts: list[int], first: int = 0, theta: float = 10000.0
):
    """Logits [W] for the draft after `drafts`, head by head, without a cache."""
    config, dims = draft.config, draft.config.attention
    context = draft.context(target_states(target, tokens, config.target_layer_ids))[first:-1]
    size, start = config.block_size, len(tokens) - 1
    ids = torch.tensor([tokens[-1]] + [config.mask_token_id] * (size - 1))
    x = target.model.embed_tokens(ids)
    places = torch.arange(first, start + size)
    for layer in draft.layers:
        inner, normed = layer.self_attn, layer.input_layernorm(x)
        rows = torch.cat((context, normed))
        key = inner.k_proj(rows).view(len(rows), dims.num_kv_heads, dims.head_dim)
        value = inner.v_proj(rows).view_as(key)
        query = inner.q_proj(normed).view(size, dims.num_heads, dims.head_dim)
        if dims.qk_norm:
            query, key = inner.q_norm(query), inner.k_norm(key)
        query = rotated(query, places[-size:], theta)
        key = rotated(key, places, theta)
        heads = []
        for h in range(dims.num_heads):
            g = h // (dims.num_heads // dims.num_kv_heads)
            score = query[:, h] @ key[:, g].T / dims.head_dim**0.5
            heads.append(score.softmax(-1) @ value[:, g])
        x = x + inner.o_proj(torch.cat(heads, dim=-1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    j = len(drafts)
    row = draft.norm(x)[j if config.sample_from_anchor else j + 1]
    logits, bias = target.logits(row), torch.zeros(())
    if draft.has_markov:
        previous = torch.tensor(drafts[-1] if drafts else tokens[-1])
        heads = draft.markov_head
        bias = heads.markov_w2.weight @ heads.markov_w1(previous)
    if config.draft_vocab_size is None:
        logits = logits + bias
    else:
        logits = torch.full((VOCAB,), -torch.inf)
        for j, offset in enumerate(draft.d2t.tolist()):  # the head's id j is the target's j + d2t
            at = bias if bias.dim() == 0 else bias[j]
            logits[j + offset] = draft.lm_head.weight[j] @ row + at
    logits[config.mask_token_id] = -torch.inf
    return logits


def checked_drafter(
    target, kind: str, page_size: int, qk_norm: bool = True, draft_vocab: int | None = None
):
    """A drafter over poisoned pages, all of whose proposals are recomputed."""
    draft = tiny_gqa(target, kind, qk_norm, draft_vocab)
    drafter = MADE[kind](target, draft, num_pages=300, page_size=page_size)
    for layer in range(2):
        drafter.cache.rows.layer(layer).fill_(float("nan"))
    checked, real, firsts = [0, 0], drafter.propose, dict[object, int]()

    def propose(requests):
        proposal, by_name = real(requests), {r.request_id: r for r in requests}
        for i, (name, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True)):
            row, tokens = proposal.tokens[i].tolist(), list(by_name[name].tokens)
            for j in range(count):
                first = drafter._log[name].first
                firsts[name] = first
                found = gqa_logits(target, draft, tokens, row[:j], first)
                checked[0] += 1
                if proposal.probs is None:
                    top = found.topk(2).values
                    assert row[j] == int(found.argmax()) or top[0] - top[1] < 1e-3
                else:
                    want = (found / by_name[name].sampling.temperature).softmax(-1)
                    got = proposal.probs[i, j]
                    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-3)
                    checked[1] += 1
        return proposal

    drafter.propose = propose
    return drafter, checked, firsts


@pytest.mark.parametrize(
    ("kind", "page_size", "qk_norm"),
    [("dflash", 1, True), ("dflash", 16, False), ("dspark", 5, True)],
)
def test_greedy_drafts_equal_those_without_a_cache(target, kind, page_size, qk_norm):
    drafter, checked, _ = checked_drafter(target, kind, page_size, qk_norm)
    plain, _ = run(target, prompts(5))
    tokens, history = run(target, prompts(5), drafter, 4, make_step(target, 4, num_pages=400))
    assert tokens == plain
    assert checked[0] > 200
    verified = [r for results in history for r in results if r.num_drafts]
    assert any(r.num_accepted < r.num_drafts for r in verified)
    assert drafter.cache.blocks.num_free == drafter.cache.blocks.num_pages


@pytest.mark.parametrize("kind", MADE)
def test_sampled_drafts_report_what_they_were_drawn_from(target, kind):
    drafter, checked, _ = checked_drafter(target, kind, 4)
    batch = {
        i: ([3 + i, 1, 4, 1 + i, 5][: 5 - i], SamplingParams(0.8, seed=i, max_tokens=16))
        for i in range(3)
    }
    for _ in generate(target, make_step(target, 4, num_pages=400), batch, drafter, 3):
        pass
    assert checked[1] > 60


def test_a_prefix_found_in_the_cache_is_not_read(target):
    drafter, checked, firsts = checked_drafter(target, "dflash", 4)
    step = make_step(target, 4, num_pages=400)
    prompt = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 1]
    for name in ("a", "b"):
        for _ in generate(target, step, {name: (prompt, SamplingParams(max_tokens=9))}, drafter, 3):
            pass
    assert firsts == {"a": 0, "b": 8}
    assert checked[0] > 10


@pytest.mark.parametrize("kind", [*MADE, "ddtree"])
def test_check_drafter_passes(target, kind):
    draft = tiny_gqa(target, "dflash" if kind == "ddtree" else kind)

    def make(step):
        made = MADE.get(kind, GQADFlashDrafter)(target, draft, num_pages=1400, page_size=8)
        return DDTreeDrafter(made) if kind == "ddtree" else made

    check_drafter(make, target, num_drafts=3, num_samples=200).raise_if_failed()


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("yarn", [False, True])
def test_layer_equals_that_of_transformers(yarn):
    pytest.importorskip("transformers")
    from transformers import Qwen3Config, Qwen3Model

    from drafters.gqa_model import GQALayer
    from specmla import RotaryEmbedding

    scaling = dict(YARN) if yarn else {"rope_type": "default", "rope_theta": 1e4}
    config = Qwen3Config(
        rope_parameters=scaling,
        max_position_embeddings=64,
        vocab_size=9,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
    )
    theirs = Qwen3Model(config).eval()
    randomise(theirs, 3)
    source = config.to_dict()
    dims = GQAConfig.from_hf(source)
    ours = GQALayer(dims, 40)
    ours.load_state_dict(theirs.layers[0].state_dict())
    ids = torch.randint(9, (2, 7), generator=torch.Generator().manual_seed(1))
    angles = RotaryEmbedding(dims).at(torch.arange(7), torch.float32)
    nothing = torch.empty(2, 0, 2, 8)
    with torch.no_grad():
        want = theirs(ids).last_hidden_state
        causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
        got = theirs.norm(ours(theirs.embed_tokens(ids), angles, (nothing, nothing), causal))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", MADE)
def test_files(target, tmp_path, kind):
    model = tiny_gqa(target, kind)
    save_block_model(model, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"layers.1.self_attn.k_norm.weight", "layers.0.mlp.up_proj.weight", "fc.weight"} < names
    again = load_block_model(tmp_path, target)
    assert isinstance(again, GQABlockModel)
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    make = drafter_from(tmp_path, target, num_requests=2, longest=40, backend="reference")
    assert type(make(make_step(target, 4, num_pages=40))) is MADE[kind]


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "rope_type is 'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor is 0"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types has \['sliding_attention'\]"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 4}, "accepted are multiples of num_key_value_heads, 4"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"architectures": ["DominoDraftModel"]}, r"\['DominoDraftModel'\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(target, tmp_path, changes, reason):
    save_block_model(tiny_gqa(target, "dflash"), tmp_path)
    load_block_model(tmp_path, target)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=reason):
        load_block_model(tmp_path, target)


def test_fields_of_released_configs_that_change_nothing(target, tmp_path):
    """As Qwen3 writes them: a window that is not used, full layers, rotary parameters by name."""
    save_block_model(tiny_gqa(target, "dflash"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_theta"]
    path.write_text(json.dumps(config))
    full = ["full_attention"] * 2
    rope = {"rope_type": "default", "rope_theta": 5e5}
    edit(tmp_path, use_sliding_window=False, sliding_window=4096, layer_types=full)
    edit(tmp_path, rope_parameters=rope, num_target_layers=3, torch_dtype="bfloat16")
    assert load_block_model(tmp_path, target).config.attention.rope_theta == 5e5


def test_networks_of_the_other_kind_are_refused(target):
    with pytest.raises(ArgumentError, match="draft is a BlockDraftModel"):
        GQADFlashDrafter(target, tiny_block(target, "dflash"), num_pages=9)
    with pytest.raises(ArgumentError, match="backend is 'triton', accepted is None"):
        GQADFlashDrafter(target, tiny_gqa(target, "dflash"), num_pages=9, backend="triton")
    with pytest.raises(ArgumentError, match="attention is grouped-query"):
        DFlashDrafter(target, tiny_gqa(target, "dflash"), num_pages=9)
    with pytest.raises(ArgumentError, match="attention is grouped-query"):
        BlockDraftModel(tiny_gqa(target, "dflash").config)


def as_speculators(folder, **changes) -> None:
    """Write the config of a saved network as `speculators` would."""
    path = folder / "config.json"
    flat = json.loads(path.read_text())
    own = flat.pop("dflash_config")
    kind = {"DFlashDraftModel": "dflash", "DSparkDraftModel": "dspark"}[
        flat.pop("architectures")[0]
    ]
    layers = [i + 1 for i in own.pop("target_layer_ids")]
    source = {
        "architectures": ["DraftModel"],
        "model_type": "speculators",
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": None}},
        "transformer_layer_config": flat,
        "aux_hidden_state_layer_ids": layers,
        "draft_vocab_size": VOCAB,
        **own,
    }
    path.write_text(json.dumps(source | changes))


@pytest.mark.parametrize("kind", MADE)
def test_configs_of_speculators(target, tmp_path, kind):
    model = tiny_gqa(target, kind)
    save_block_model(model, tmp_path)
    as_speculators(tmp_path)
    again = load_block_model(tmp_path, target)
    assert again.config == model.config
    made = drafter_from(tmp_path, target, num_requests=2, longest=40)
    assert type(made(make_step(target, 4, num_pages=40))) is MADE[kind]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
        ({"draft_vocab_size": 99}, r"draft_vocab_size is 99, accepted are 1 \.\. vocab_size, 61"),
        ({"draft_vocab_size": 30}, "missing: lm_head.weight"),
        ({"logit_scale": -2.0}, "logit_scale is -2.0"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal is True"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
    ],
)
def test_what_of_speculators_is_not_served_is_refused_by_name(target, tmp_path, changes, reason):
    save_block_model(tiny_gqa(target, "dspark"), tmp_path)
    as_speculators(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=reason):
        load_block_model(tmp_path, target)
    with pytest.raises(CheckpointError, match=reason):
        drafter_from(tmp_path, target, num_requests=2, longest=40)


@pytest.mark.parametrize("kind", MADE)
def test_blocks_of_a_reduced_vocabulary(target, tmp_path, kind):
    """A head of its own, d2t and t2d: as released by speculators, drawn from what it knows."""
    for temperature in (0.0, 0.8):
        drafter, checked, _ = checked_drafter(target, kind, 4, draft_vocab=40)
        batch = prompts(4, temperature=temperature)
        run(target, batch, drafter, 3, make_step(target, 4, num_pages=400))
        assert checked[temperature > 0] > 60
    model = drafter.draft
    save_block_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["t2d"].nonzero()[:, 0].tolist() == (torch.arange(40) + model.d2t).tolist()
    assert tensors["lm_head.weight"].shape[0] == 40
    as_speculators(tmp_path, draft_vocab_size=40)
    again = load_block_model(tmp_path, target)
    assert again.config == model.config
    assert torch.equal(again.d2t, model.d2t)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    check_drafter(
        lambda step: MADE[kind](target, again, num_pages=1400, page_size=8),
        target,
        num_drafts=3,
        num_samples=300,
    ).raise_if_failed()
    save_file(tensors | {"d2t": tensors["d2t"] * 0}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="t2d names other ids than d2t gives"):
        load_block_model(tmp_path, target)


def test_trees_of_a_reduced_vocabulary_hold_known_ids_only(target):
    draft = tiny_gqa(target, "dflash", draft_vocab=20)
    drafter = DDTreeDrafter(GQADFlashDrafter(target, draft, num_pages=300, page_size=4))
    seen, real = set(), drafter.propose

    def propose(requests):
        given = real(requests)
        seen.update(given.tokens[given.tokens >= 0].tolist())
        return given

    drafter.propose = propose
    plain, _ = run(target, prompts(4))
    tokens, _ = run(target, prompts(4), drafter, 6, make_step(target, 4, num_pages=400))
    assert tokens == plain
    assert len(seen) > 4
    assert seen <= set((torch.arange(20) + draft.d2t).tolist())
