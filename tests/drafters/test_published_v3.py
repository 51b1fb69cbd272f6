"""DeepSeek-V3's checkpoint scaled down: its config.json field by field, e4m3 weights by their
names in shards, routed experts in the MTP layer as well; target and module out of one folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import MTPDrafter
from specmla import CheckpointError, build_step, load_checkpoint, load_mtp
from specmla.cli.drafts import drafter_from
from tests.drafters.networks import VOCAB, mtp_logits
from tests.e2e.conftest import prompts, run

LAYERS, HIDDEN, INNER, EXPERT, EXPERTS, HEADS = 2, 144, 160, 40, 8, 4
Q_RANK, RANK, NOPE, ROPE, V = 48, 32, 16, 8, 16

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "kv_lora_rank": RANK,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": EXPERT,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 3,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
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
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": V,
    "vocab_size": VOCAB,
}


class Weights:
    """Tensors by their published names; linear ones as codes with a scale a block."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.found: dict[str, Tensor] = {}

    def norm(self, name: str, size: int) -> None:
        weight = torch.rand(size, generator=self.generator) + 0.5
        self.found[name + ".weight"] = weight.bfloat16()

    def plain(self, name: str, *shape: int, std: float = 0.25) -> None:
        self.found[name] = (torch.randn(shape, generator=self.generator) * std).bfloat16()

    def codes(self, name: str, rows: int, columns: int) -> None:
        values = torch.randn(rows, columns, generator=self.generator) * 60
        self.found[name + ".weight"] = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
        scale = (torch.rand(blocks, generator=self.generator) + 0.5) * 0.15 / 60
        self.found[name + ".weight_scale_inv"] = scale

    def mlp(self, at: str, width: int) -> None:
        self.codes(at + ".gate_proj", width, HIDDEN)
        self.codes(at + ".up_proj", width, HIDDEN)
        self.codes(at + ".down_proj", HIDDEN, width)

    def layer(self, index: int) -> None:
        at = f"model.layers.{index}"
        self.norm(at + ".input_layernorm", HIDDEN)
        self.norm(at + ".post_attention_layernorm", HIDDEN)
        inner = at + ".self_attn"
        self.codes(inner + ".q_a_proj", Q_RANK, HIDDEN)
        self.norm(inner + ".q_a_layernorm", Q_RANK)
        self.codes(inner + ".q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
        self.codes(inner + ".kv_a_proj_with_mqa", RANK + ROPE, HIDDEN)
        self.norm(inner + ".kv_a_layernorm", RANK)
        self.codes(inner + ".kv_b_proj", HEADS * (NOPE + V), RANK)
        self.codes(inner + ".o_proj", HIDDEN, HEADS * V)
        if index < 1:
            self.mlp(at + ".mlp", INNER)
            return
        self.plain(at + ".mlp.gate.weight", EXPERTS, HIDDEN)
        bias = torch.randn(EXPERTS, generator=self.generator) * 0.1
        self.found[at + ".mlp.gate.e_score_correction_bias"] = bias
        for expert in range(EXPERTS):
            self.mlp(f"{at}.mlp.experts.{expert}", EXPERT)
        self.mlp(at + ".mlp.shared_experts", EXPERT)


def publish(folder: Path) -> dict[str, Tensor]:
    """Write config.json, an index and two shards, as the release has them."""
    weights = Weights()
    weights.plain("model.embed_tokens.weight", VOCAB, HIDDEN, std=1.0)
    weights.norm("model.norm", HIDDEN)
    weights.plain("lm_head.weight", VOCAB, HIDDEN)
    for index in range(LAYERS + 1):
        weights.layer(index)
    at, found = f"model.layers.{LAYERS}", weights.found
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights.norm(f"{at}.{name}", HIDDEN)
    weights.plain(at + ".eh_proj.weight", HIDDEN, 2 * HIDDEN, std=0.1)
    found[at + ".embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    found[at + ".shared_head.head.weight"] = found["lm_head.weight"].clone()
    names = sorted(found)
    files = {name: f"model-0000{1 + i % 2}-of-000002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: found[name] for name in names if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return found


def test_target_and_module_out_of_one_folder(tmp_path: Path) -> None:
    """Drafts are those of one pass over the text without a cache, and verified as any."""
    found = publish(tmp_path)
    target, config = load_checkpoint(tmp_path, dtype=torch.float32)
    assert (config.num_layers, config.num_mtp_layers) == (LAYERS, 1)
    module = load_mtp(tmp_path, target)
    at = f"model.layers.{LAYERS}."
    state = module.state_dict()
    assert torch.equal(state["eh_proj.weight"], found[at + "eh_proj.weight"].float())
    codes, scale = (
        found[at + "mlp.experts.5.down_proj.weight" + end].float() for end in ("", "_scale_inv")
    )
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:HIDDEN, :EXPERT]
    assert torch.equal(state["mlp.experts.5.down_proj.weight"], codes * wide)
    step = build_step(target, num_pages=200, page_size=4, num_draft_layers=1)
    drafter = drafter_from(tmp_path, target, num_requests=4, longest=60)(step)
    assert type(drafter) is MTPDrafter
    seen, real = [0], drafter.propose

    def propose(requests):
        proposal, by_name = real(requests), {r.request_id: r for r in requests}
        for i, (who, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True)):
            row, text = proposal.tokens[i].tolist(), list(by_name[who].tokens)
            for j in range(count):
                want = mtp_logits(target, module, text, row[:j])
                top = want.topk(2).values
                assert row[j] == int(want.argmax()) or top[0] - top[1] < 1e-3
                seen[0] += 1
        return proposal

    drafter.propose = propose
    plain, _ = run(target, prompts(3))
    tokens, _ = run(target, prompts(3), drafter, 3, step)
    assert tokens == plain
    assert seen[0] > 40


@pytest.mark.parametrize("gone", ["eh_proj.weight", "mlp.experts.7.up_proj.weight_scale_inv"])
def test_a_tensor_that_is_missing_is_named(gone: str, tmp_path: Path) -> None:
    publish(tmp_path)
    target, _ = load_checkpoint(tmp_path, dtype=torch.float32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = f"model.layers.{LAYERS}.{gone}"
    path = tmp_path / index["weight_map"].pop(name)
    state = load_file(path)
    del state[name]
    save_file(state, path, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_mtp(tmp_path, target)
    assert gone.removesuffix("_scale_inv") in str(caught.value)
