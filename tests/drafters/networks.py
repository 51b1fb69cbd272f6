"""Tiny targets and neural drafters of theirs, and their drafts recomputed without any cache."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.block_config import BlockConfig
from drafters.block_model import BlockDraftModel
from specmla import (
    FINAL,
    DeepseekConfig,
    DeepseekForCausalLM,
    MLAConfig,
    MTPModule,
    StateCollector,
)

VOCAB = 61


def attention(hidden: int, heads: int = 2) -> MLAConfig:
    return MLAConfig(
        hidden_size=hidden,
        num_heads=heads,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )


def randomise(module: torch.nn.Module, seed: int, std: float = 0.25) -> None:
    """Weights large enough that logits differ and positions matter; norms that are not 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(0, std, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)


def tiny_target(layers: int = 3, hidden: int = 32, limit: int = 160) -> DeepseekForCausalLM:
    model = DeepseekForCausalLM(
        DeepseekConfig(attention(hidden), layers, VOCAB, 48, limit, num_mtp_layers=1)
    )
    randomise(model, 7)
    return model.eval()


def tiny_mtp(target: DeepseekForCausalLM) -> MTPModule:
    module = MTPModule(target.config)
    randomise(module, 8)
    return module.eval()


def tiny_block(target: DeepseekForCausalLM, kind: str, **changes) -> BlockDraftModel:
    is_dspark = kind == "dspark"
    config = {
        "attention": attention(target.config.attention.hidden_size, heads=3),
        "num_layers": 2,
        "intermediate_size": 40,
        "vocab_size": VOCAB,
        "block_size": 5,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": (0, 2),
        "sample_from_anchor": is_dspark,
        "markov_rank": 6 if is_dspark else 0,
        "confidence_head": is_dspark,
        "architecture": "DSparkDraftModel" if is_dspark else "DFlashDraftModel",
    } | changes
    model = BlockDraftModel(BlockConfig(**config))
    randomise(model, 9)
    return model.eval()


@torch.no_grad()
def target_states(target: DeepseekForCausalLM, tokens: list[int], layers) -> Tensor:
    """States [S, m * D] of all tokens, by one pass without a cache."""
    states = StateCollector(layers, target.config.num_layers)
    target.model.forward_full(torch.tensor([tokens]), states)
    return states.joined()[0]


@torch.no_grad()
def mtp_logits(target, module, tokens: list[int], drafts: list[int], first: int = 0) -> Tensor:
    """Logits [W] for the draft after `drafts`, from rows `first` on, by one pass over all rows."""
    states = target_states(target, tokens, (FINAL,))
    hidden = states[first : len(tokens) - 1]
    known = tokens[first + 1 :]
    for draft in [*drafts, None]:
        positions = torch.arange(first, first + len(known))
        embedded = target.model.embed_tokens(torch.tensor(known))
        fused = module.fuse(embedded, hidden, positions)[None]
        angles = target.model.rotary.at(positions, fused.dtype)
        out = module.normed(module.forward_full(fused, angles))[0]
        if draft is not None:
            hidden, known = torch.cat((hidden, out[-1:])), [*known, draft]
    return target.logits(out[-1])


@torch.no_grad()
def block_states(target, draft, tokens: list[int], first: int = 0) -> Tensor:
    """States [B, D] of a block behind `tokens`, by dense expanded attention."""
    config = draft.config
    context = draft.context(target_states(target, tokens, config.target_layer_ids))[first:-1]
    size, start = config.block_size, len(tokens) - 1
    ids = torch.tensor([tokens[-1]] + [config.mask_token_id] * (size - 1))
    x = target.model.embed_tokens(ids)
    before = draft.rotary.at(torch.arange(first, start), x.dtype)
    within = draft.rotary.at(torch.arange(start, start + size), x.dtype)
    for index, layer in enumerate(draft.layers):
        inner = layer.self_attn
        q_nope, q_rope, latent, rope = inner._project(layer.input_layernorm(x), within)
        c_latent, c_rope = draft.context_latent(index, context, before)
        key, value = inner.kv_b_proj.expand(
            torch.cat((c_latent, latent)), torch.cat((c_rope, rope))
        )
        query = torch.cat((q_nope, q_rope), dim=-1)
        score = torch.einsum("qhd,khd->hqk", query, key) * inner.softmax_scale
        mixed = torch.einsum("hqk,khv->qhv", score.softmax(-1), value)
        x = x + inner.o_proj(mixed.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x)


@torch.no_grad()
def block_logits(target, draft, tokens: list[int], drafts: list[int], first: int = 0) -> Tensor:
    """Logits [W] for the draft after `drafts`."""
    config, j = draft.config, len(drafts)
    states = block_states(target, draft, tokens, first)
    logits = target.logits(states[j if config.sample_from_anchor else j + 1])
    if draft.has_markov:
        previous = torch.tensor(drafts[-1] if drafts else tokens[-1])
        logits = logits + draft.markov_head.markov_w2.weight @ draft.markov_head.markov_w1(previous)
    logits[config.mask_token_id] = -torch.inf
    return logits
