"""What a checkpoint's config.json may say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specmla.errors import ArgumentError
from specmla.models.config import DeepseekConfig

# As published: DeepSeek-V3 and DeepSeek-V2-Lite, fields that are read.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
LITE: dict[str, Any] = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "eos_token_id": [1, 7],
}
LITE.pop("num_nextn_predict_layers")


def without(source: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in source.items() if k not in names}


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_published_configs(kind: type) -> None:
    v3, lite = DeepseekConfig.from_hf(kind(**V3)), DeepseekConfig.from_hf(kind(**LITE))
    assert v3.attention.softmax_scale == pytest.approx(0.135234, abs=5e-7)
    assert (v3.num_layers, v3.num_mtp_layers, v3.eos_token_ids) == (61, 1, (1,))
    assert [v3.is_moe_layer(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    assert lite.attention.q_lora_rank is None
    assert (lite.num_mtp_layers, lite.eos_token_ids) == (0, (1, 7))
    assert lite.moe is not None
    assert (lite.moe.topk_method, lite.moe.scoring_func) == ("greedy", "softmax")


def test_routing_left_unsaid_follows_the_architecture() -> None:
    names = ("topk_method", "scoring_func", "moe_layer_freq")
    for source in (V3, LITE):
        assert DeepseekConfig.from_hf(without(source, *names)) == DeepseekConfig.from_hf(source)
    assert (
        DeepseekConfig.from_hf(without(V3, "architectures")).architecture == V3["architectures"][0]
    )


@pytest.mark.parametrize("source", [V3, LITE])
def test_to_hf_reads_back(source: dict[str, Any]) -> None:
    for changed in ({}, {"n_routed_experts": None}, {"rope_scaling": None}, {"eos_token_id": None}):
        config = DeepseekConfig.from_hf(source | changed)
        assert DeepseekConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("dense", [{"n_routed_experts": None}, {"first_k_dense_replace": 61}])
def test_dense_models(dense: dict[str, Any]) -> None:
    assert DeepseekConfig.from_hf(V3 | dense).moe is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"\['LlamaForCausalLM'\], accepted are"),
        ({"architectures": None, "model_type": "llama"}, r"\['llama'\], accepted are"),
        ({"architectures": None, "model_type": None}, r"\[None\], accepted are"),
        ({"hidden_act": "gelu", "vocab_size": None}, "vocab_size is missing; hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True, accepted is False"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"eos_token_id": [1, 129280]}, r"eos_token_ids \[129280\] are outside 0 .. 129279"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ],
)
def test_what_cannot_be_served(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DeepseekConfig.from_hf(V3 | changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("architectures", v) for v in (1, [[1]], True)),
        *(("num_hidden_layers", v) for v in ("61", [61], 2**31)),
        *(("vocab_size", v) for v in ("129280", [1], 10**30)),
        *(("max_position_embeddings", v) for v in ("163840", [1], 10**400)),
        *(("rope_theta", v) for v in ("1e4", [1], 10**400)),
        ("rms_norm_eps", 10**400),
        *(("eos_token_id", v) for v in ("a", 1.5, True, ["a"], [None], {"a": 1})),
        ("bos_token_id", "a"),
        *(("first_k_dense_replace", v) for v in ("3", [3], {})),
        *(("routed_scaling_factor", v) for v in ("2.5", [1], float("nan"), 10**400)),
        # A string is true: "false" would tie the head or add a bias.
        *((flag, "false") for flag in ("tie_word_embeddings", "norm_topk_prob", "attention_bias")),
        ("rope_interleave", "false"),
        *(("rope_scaling", V3["rope_scaling"] | {"factor": v}) for v in ("40", 10**400)),
        (
            "rope_scaling",
            V3["rope_scaling"] | {"original_max_position_embeddings": "4096"},
        ),
    ],
)
def test_values_of_other_types_are_refused_by_name(name: str, value: Any) -> None:
    what = "factor|original_max_position" if name == "rope_scaling" else name
    ours = {"num_hidden_layers": "num_layers"}.get(name, name)
    with pytest.raises(ArgumentError, match=f"{what}|{ours}"):
        DeepseekConfig.from_hf(V3 | {name: value})
