"""A tiny grouped-query EAGLE-3 head, checkpoints in the released spellings, and its drafts
recomputed from their tensors alone: no cache, no module of ours."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.eagle3_config import Eagle3Config
from drafters.gqa_config import GQAConfig
from drafters.gqa_eagle3_model import GQAEagle3Model
from tests.drafters.networks import VOCAB, randomise, target_states

HEADS, KEYS, WIDTH = 6, 2, 8
VARIANTS = {
    "plain": {},
    "residual": {"norm_before_residual": True, "norm_before_fc": True},
    "carried": {"fc_norm": True, "norm_output": True},
}


def tiny_gqa_eagle3(
    target, draft_vocab: int = 40, qk_norm: bool = False, layers=(0, 1, 2), **flags: bool
) -> GQAEagle3Model:
    """Six query heads over two key heads, wider together than the hidden states."""
    hidden = target.config.attention.hidden_size
    dims = GQAConfig(hidden, HEADS, KEYS, WIDTH, qk_norm=qk_norm)
    model = GQAEagle3Model(Eagle3Config(dims, 40, VOCAB, draft_vocab, layers, **flags))
    randomise(model, 13)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort()
    model.d2t.copy_(ids.values - torch.arange(draft_vocab))
    return model.eval()


def tensors_of(model: GQAEagle3Model, layer: str = "midlayer") -> dict[str, Tensor]:
    """The tensors of a released file; `layer` is the name of its layer there."""
    found = {k.replace("midlayer.", layer + "."): v.clone() for k, v in model.state_dict().items()}
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[model.target_ids] = True
    return found | {"d2t": model.d2t.clone(), "t2d": known}


def write(folder, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def llama_config(model: GQAEagle3Model, **changes) -> dict:
    """A config.json as training for SGLang writes it: flat, outputs of layers in a section."""
    dims, config = model.config.attention, model.config
    flat = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
        },
        "attention_bias": False,
        "bos_token_id": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "num_attention_heads": dims.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": dims.num_kv_heads,
        "rms_norm_eps": dims.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": dims.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    return flat | changes


def speculators_config(model: GQAEagle3Model, **changes) -> dict:
    """A config.json of speculators: the layer by itself, layers counted before their states."""
    config = model.config
    layer = llama_config(model, model_type="qwen3" if config.attention.qk_norm else "llama")
    for name in ("architectures", "eagle_config", "draft_vocab_size"):
        del layer[name]
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {},
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "has_no_defaults_at_init": False,
        "model_type": "speculators",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["DeepseekV3ForCausalLM"], "name_or_path": "some/model"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    } | changes


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def _turned(x: Tensor, places: Tensor) -> Tensor:
    """Rotate halves of [n, heads, d]."""
    half = x.shape[-1] // 2
    angle = places.double()[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def _out(t, flags, embedded, hidden, places) -> Tensor:
    """The layer over all rows, float64."""
    at = "midlayer."
    normed = _norm(hidden, t[at + "hidden_norm.weight"])
    rows = torch.cat((_norm(embedded, t[at + "input_layernorm.weight"]), normed), -1)
    part = {n: t[f"{at}self_attn.{n}_proj.weight"].double() for n in ("q", "k", "v", "o")}
    query = (rows @ part["q"].T).view(-1, HEADS, WIDTH)
    key, value = ((rows @ part[n].T).view(-1, KEYS, WIDTH) for n in ("k", "v"))
    if f"{at}self_attn.q_norm.weight" in t:
        query = _norm(query, t[f"{at}self_attn.q_norm.weight"])
        key = _norm(key, t[f"{at}self_attn.k_norm.weight"])
    query, key = _turned(query, places), _turned(key, places)
    heads = []
    for h in range(HEADS):
        g = h // (HEADS // KEYS)
        score = query[:, h] @ key[:, g].T / WIDTH**0.5
        score = score.masked_fill(torch.ones_like(score).triu(1).bool(), -torch.inf)
        heads.append(score.softmax(-1) @ value[:, g])
    stream = normed if flags.get("norm_before_residual") else hidden
    stream = stream + torch.cat(heads, -1) @ part["o"].T
    x = _norm(stream, t[at + "post_attention_layernorm.weight"])
    gate, up, down = (t[f"{at}mlp.{n}_proj.weight"].double() for n in ("gate", "up", "down"))
    return stream + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@torch.no_grad()
def gqa_eagle3_logits(
    target, t: dict[str, Tensor], flags, layers, tokens: list[int], drafts: list[int], first=0
) -> Tensor:
    """Logits [W] for the draft after `drafts`, -inf for what the head does not know."""
    states = target_states(target, tokens, layers)[first : len(tokens) - 1]
    if flags.get("norm_before_fc"):
        states = _norm(states, t["input_norm.weight"])
    if flags.get("fc_norm"):
        parts = states.chunk(len(layers), -1)
        states = torch.cat([_norm(x, t[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1)
    hidden, known = states.double() @ t["fc.weight"].double().T, tokens[first + 1 :]
    for draft in [*drafts, None]:
        embedded = target.model.embed_tokens(torch.tensor(known))
        places = torch.arange(first, first + len(known))
        out = _out(t, flags, embedded, hidden, places)
        carried = _norm(out, t["norm.weight"]) if flags.get("norm_output") else out
        if draft is not None:
            hidden, known = torch.cat((hidden, carried[-1:])), [*known, draft]
    logits = _norm(out[-1], t["norm.weight"]) @ t["lm_head.weight"].double().T
    full = torch.full((VOCAB,), -torch.inf)
    full[t["t2d"].nonzero()[:, 0]] = logits.float()
    return full
