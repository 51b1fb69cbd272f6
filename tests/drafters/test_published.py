"""Checkpoints as they are published, scaled down: config.json files field by field, and tensors
under the names and in the shapes that these have, made here without a module of ours."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from drafters import (
    DDTreeDrafter,
    GQADFlashDrafter,
    GQADSparkDrafter,
    load_block_model,
)
from specmla import CheckpointError
from specmla.cli.drafts import drafter_from
from tests.drafters.networks import VOCAB, tiny_target
from tests.drafters.test_gqa import gqa_logits
from tests.e2e.conftest import make_step, prompts, run

LAYERS, HIDDEN, HEADS, KEYS, WIDTH, INNER, RANK = 2, 32, 4, 2, 8, 40, 6

QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": WIDTH,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 40960,
    "max_window_layers": LAYERS,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KEYS,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
MASK = {"mask_token_id": VOCAB - 1}

ZLAB_DFLASH = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
    "block_size": 5,
    "dflash_config": MASK | {"target_layer_ids": [0, 2]},
    "num_target_layers": 3,
}
"""Qwen3-8B-DFlash-b16 and the like."""

DEEPSPEC = QWEN3 | MARKOV | CONFIDENCE | MASK | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "num_anchors": 512,
    "num_target_layers": 3,
    "target_layer_ids": [0, 2],
}  # fmt: skip
"""dspark_qwen3_4b_block7: flat, with copies of the target's embedding and head."""

SPECFORGE_KIMI = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "dflash_config": MASK | MARKOV | CONFIDENCE | {
        "target_layer_ids": [0, 2],
        "projector_type": "dspark",
        "confidence_head_alpha": 1.0,
    },
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
    },
    "rope_theta": 50000.0,
    "num_target_layers": 3,
}  # fmt: skip
"""A DSpark network that goes by DFlash's name, as training for SGLang writes it."""

SPECFORGE_GLM = QWEN3 | {
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "dflash_config": MASK | {
        "attention_mode": "gqa", "projector_type": "dspark", "target_layer_ids": [0, 2],
    },
    "dspark_config": MARKOV | CONFIDENCE,
    "eos_token_id": [1, 2, 3],
    "num_target_layers": 3,
}  # fmt: skip
"""GLM-5.2's, with a section of its own for the head."""


def speculators(kind: str, drafts: int | None, **fields: object) -> dict:
    """As `speculators` saves: what the layers are in a section, what is proposed in another."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
    }
    layers = {k: v for k, v in QWEN3.items() if k not in ("rope_theta", "rope_scaling")}
    own: dict[str, object] = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 4,
        "draft_vocab_size": VOCAB,
        "has_no_defaults_at_init": False,
        "max_anchors": 1024,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [] if drafts is None else [proposal],
            "verifier": {"architectures": ["GlmMoeDsaForCausalLM"], "name_or_path": "some/model"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layers
        | {"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}},
    }
    return MASK | own | (MARKOV | CONFIDENCE if kind == "dspark" else {}) | fields


RED_HAT = speculators("dspark", 4, sample_from_anchor=True)
RED_HAT_SILENT = speculators("dspark", 3)
"""GLM-5.2's: a block of 16 for 15 drafts, and no word on the anchor."""
RED_HAT_LLAMA = speculators("dflash", 3, projector_type="dflash", shift_label=False)
RED_HAT_LLAMA["transformer_layer_config"] = RED_HAT_LLAMA["transformer_layer_config"] | {
    "model_type": "llama"
}
"""Qwen3-30B-A3B's, which says llama of layers that norm queries and keys."""


@pytest.fixture(scope="module")
def target():
    return tiny_target(hidden=HIDDEN)


def tensors(dspark: bool, seed: int = 3) -> dict[str, torch.Tensor]:
    """Two Qwen3 layers and what stands around them."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        at = f"layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
            at + "self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
            at + "self_attn.k_proj.weight": (KEYS * WIDTH, HIDDEN),
            at + "self_attn.v_proj.weight": (KEYS * WIDTH, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
            at + "self_attn.q_norm.weight": (WIDTH,),
            at + "self_attn.k_norm.weight": (WIDTH,),
            at + "mlp.gate_proj.weight": (INNER, HIDDEN),
            at + "mlp.up_proj.weight": (INNER, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
    if dspark:
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB, RANK),
            "markov_head.markov_w2.weight": (VOCAB, RANK),
            "confidence_head.proj.weight": (1, HIDDEN + RANK),
            "confidence_head.proj.bias": (1,),
        }
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.25
        for name, shape in shapes.items()
    }


def copies(target) -> dict[str, torch.Tensor]:
    """The target's embedding and head, as some files hold them."""
    head = target.lm_head.weight
    return {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach().clone(),
        "lm_head.weight": head.detach().clone(),
    }


def publish(folder, config: dict, found: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors")


CASES = {
    "z-lab": (ZLAB_DFLASH, False, False, GQADFlashDrafter),
    "deepspec": (DEEPSPEC, True, True, GQADSparkDrafter),
    "specforge-kimi": (SPECFORGE_KIMI, True, True, GQADSparkDrafter),
    "specforge-glm": (SPECFORGE_GLM, True, True, GQADSparkDrafter),
    "red-hat": (RED_HAT, True, True, GQADSparkDrafter),
    "red-hat-silent": (RED_HAT_SILENT, True, False, GQADSparkDrafter),
    "red-hat-llama": (RED_HAT_LLAMA, False, False, GQADFlashDrafter),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_published_block_network_drafts_what_its_tensors_say(name, target, tmp_path):
    """Through the commands' loader; every draft against one pass over the text without a cache."""
    config, dspark, from_anchor, kind = CASES[name]
    found = tensors(dspark)
    publish(tmp_path, config, found | (copies(target) if name == "deepspec" else {}))
    draft = load_block_model(tmp_path, target)
    assert draft.config.target_layer_ids == (0, 2)
    assert draft.config.sample_from_anchor is from_anchor
    assert draft.config.num_drafts == config["block_size"] - (not from_anchor)
    assert draft.config.draft_vocab_size is None
    assert draft.config.attention.qk_norm
    for key, value in found.items():
        assert torch.equal(draft.state_dict()[key], value), key
    if config["block_size"] == 4 and "rope_scaling" not in config:
        assert draft.config.attention.rope_theta == 8e6
    elif config["rope_scaling"] is not None:
        assert draft.config.attention.rope_scaling.factor == 64.0
    drafter = drafter_from(tmp_path, target, num_requests=4, longest=60)(
        make_step(target, 4, num_pages=400)
    )
    assert type(drafter) is kind
    seen, real = [0], drafter.propose
    theta = draft.config.attention.rope_theta

    def propose(requests):
        proposal, by_name = real(requests), {r.request_id: r for r in requests}
        for i, (who, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True)):
            row, text = proposal.tokens[i].tolist(), list(by_name[who].tokens)
            for j in range(count):
                want = gqa_logits(target, draft, text, row[:j], theta=theta)
                top = want.topk(2).values
                assert row[j] == int(want.argmax()) or top[0] - top[1] < 1e-3
                seen[0] += 1
        return proposal

    if config.get("rope_scaling") is None:  # the pass by hand knows plain angles
        drafter.propose = propose
    plain, _ = run(target, prompts(3))
    tokens, _ = run(target, prompts(3), drafter, 4, make_step(target, 4, num_pages=400))
    assert tokens == plain
    assert seen[0] > 40 or config.get("rope_scaling") is not None


def test_a_head_of_its_own_is_used_where_it_differs_from_the_targets(target, tmp_path):
    """Trained beside the layers, over all ids: as some of `speculators` are."""
    own = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))
    shared = copies(target)
    publish(tmp_path, RED_HAT, tensors(True) | shared | {"lm_head.weight": own})
    draft = load_block_model(tmp_path, target)
    state = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(draft.logits(state, target), state @ own.T)
    publish(tmp_path, RED_HAT, tensors(True) | shared)
    draft = load_block_model(tmp_path, target)
    assert torch.equal(draft.logits(state, target), target.logits(state))
    shared["embed_tokens.weight"][5] += 1
    publish(tmp_path, RED_HAT, tensors(True) | shared)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not the target's"):
        load_block_model(tmp_path, target)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ZLAB_DFLASH | {"architectures": ["DFlash2DraftModel"]}, r"\['DFlash2DraftModel'\]"),
        (ZLAB_DFLASH | {"architectures": ["Gemma4DSparkModel"]}, r"\['Gemma4DSparkModel'\]"),
        (ZLAB_DFLASH | {"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        (ZLAB_DFLASH | {"is_causal": True}, "is_causal is True, accepted is False"),
        (ZLAB_DFLASH | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (ZLAB_DFLASH | {"dflash_config": MASK | {"target_layer_ids": [0, 2],
          "projector_type": "domino"}}, "projector_type is 'domino'"),
        (ZLAB_DFLASH | {"dflash_config": MASK | {"target_layer_ids": [0, 2],
          "input_embedding_scale": 8.0}}, "input_embedding_scale is 8.0, accepted is 1.0"),
        (speculators("dflash", 3, projector_type="domino"), "projector_type is 'domino'"),
        (speculators("dflash", 4, shift_label=True), "shift_label is True"),
        (speculators("dspark", None), "sample_from_anchor is missing"),
        (DEEPSPEC | {"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        (DEEPSPEC | {"confidence_head_with_markov": False}, "confidence_head_with_markov is False"),
    ],
)  # fmt: skip
def test_published_kinds_that_are_not_served_are_named(config, reason, target, tmp_path):
    publish(tmp_path, config, tensors(config is DEEPSPEC))
    with pytest.raises(CheckpointError, match=reason):
        drafter_from(tmp_path, target, num_requests=2, longest=40)


@pytest.mark.parametrize(("layers", "drawn", "want"), [
    (36, 5, (1, 9, 17, 25, 33)), (61, 6, (1, 12, 24, 35, 47, 58)), (28, 1, (14,)),
])  # fmt: skip
def test_layers_that_a_file_does_not_name(layers, drawn, want):
    """Those of Qwen3-8B-DFlash and Kimi-K2's, which name them as well."""
    from drafters.block_config import BlockConfig

    config = ZLAB_DFLASH | {"num_target_layers": layers, "num_hidden_layers": drawn}
    config |= {"dflash_config": MASK, "layer_types": ["full_attention"] * drawn}
    assert BlockConfig.from_hf(config).target_layer_ids == want


def test_a_network_without_a_sequential_head_gives_trees(target, tmp_path):
    publish(tmp_path, ZLAB_DFLASH, tensors(False))
    made = drafter_from(tmp_path, target, num_requests=2, longest=60, tree=True)
    assert isinstance(made(make_step(target, 4, num_pages=99)), DDTreeDrafter)
