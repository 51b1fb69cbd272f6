"""The network of an EAGLE-3 head (arXiv:2503.01840) with an MLA layer.

States of the target, from a low, a middle and a high layer, become one: h_i = fc [a ; b ; c]. For
the token after it, with the state in the residual stream,

    y = h_i + attention [input_layernorm(Emb(t_{i+1})) ; hidden_norm(h_i)]
    g = y + mlp(post_attention_layernorm(y)),    logits of t_{i+2} = lm_head(norm(g))

For later depths g takes the place of h. Some heads norm the states before they are fused, or the
stream where it begins, or hand norm(g) on (`Eagle3Config`). The head knows a part of the vocabulary
only: its id j is the target's j + d2t[j]. Names and files are those of EAGLE-3 checkpoints, where
the layer is `midlayer` or, in those of speculators, `layers.0`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.eagle3_config import Eagle3Config, check_eagle3
from drafters.file_tensors import check_embedding, tensor_names
from drafters.vocab_map import NAMES, read_offsets, save_mapped
from specmla import (
    ArgumentError,
    CheckpointError,
    DeepseekConfig,
    DeepseekDecoderLayer,
    DeepseekForCausalLM,
    MLAAttention,
    MLAConfig,
    RotaryEmbedding,
    load_part,
    read_part_config,
)


class HeadLayer:
    """What a head's layer does around its attention; a decoder layer has the parts."""

    input_layernorm: Any
    hidden_norm: nn.RMSNorm
    post_attention_layernorm: Any
    mlp: Any
    norm_before_residual: bool

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Give the attention's input `[..., 2 D]`."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add attention `[..., D]`, then the MLP, to the residual stream."""
        stream = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        stream = stream + attended
        added: Tensor = self.mlp(self.post_attention_layernorm(stream))
        return stream + added


class Eagle3Layer(HeadLayer, DeepseekDecoderLayer):
    """A decoder layer whose attention looks at embedding and state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        dims = config.mla
        super().__init__(DeepseekConfig(dims, 1, config.vocab_size, config.intermediate_size, 1), 0)
        hidden = dims.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(hidden, eps=dims.rms_norm_eps)
        self.self_attn = MLAAttention(dataclasses.replace(dims, hidden_size=2 * hidden))
        width = dims.num_heads * dims.v_head_dim
        self.self_attn.o_proj = nn.Linear(width, hidden, bias=dims.attention_bias)


class Eagle3Model(nn.Module):
    """Fusion, one layer and a head of its own; the embedding is the target's.

    Args:
        config: its sizes.
        listed: the layer's name is `layers.0` rather than `midlayer`.

    Attributes:
        d2t: [draft_vocab_size] int64, what is added to a draft id to give the target's.
    """

    d2t: Tensor

    def __init__(self, config: Eagle3Config, listed: bool = False) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.attention.hidden_size, config.attention.rms_norm_eps
        states = len(config.target_layer_ids)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(states * hidden, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in range(states))
        self.fc = nn.Linear(states * hidden, hidden, bias=False)
        if listed:
            self.layers = nn.ModuleList([self._make_layer(config)])
        else:
            self.midlayer = self._make_layer(config)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(cast("MLAConfig", config.attention))  # has what is asked
        nothing = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", nothing, persistent=False)

    def _make_layer(self, config: Eagle3Config) -> nn.Module:
        return Eagle3Layer(config)

    @property
    def layer(self) -> Eagle3Layer:
        """Its layer, under either name."""
        return cast("Eagle3Layer", self.layers[0] if hasattr(self, "layers") else self.midlayer)

    @property
    def target_ids(self) -> Tensor:
        """The target's id [draft_vocab_size] of every draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, states: Tensor) -> Tensor:
        """Map the target's states side by side `[..., m * D]` to one `[..., D]`."""
        config = self.config
        if config.norm_before_fc:
            states = self.input_norm(states)
        if config.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused

    def carried(self, out: Tensor) -> Tensor:
        """Give what takes the state's place at the next depth, of the layer's output."""
        return cast("Tensor", self.norm(out)) if self.config.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """Map the layer's output `[..., D]` to logits `[..., draft_vocab_size]`."""
        found: Tensor = self.lm_head(self.norm(out))
        return found


def load_eagle3(
    directory: str | Path, target: DeepseekForCausalLM, dtype: torch.dtype | None = None
) -> Eagle3Model:
    """Load an EAGLE-3 checkpoint on the target's device; a `GQAEagle3Model` where its layer is a
    grouped-query one.

    Raises:
        CheckpointError: damaged files, other tensors, or a config that can't be served with this
            target; every reason is named.
    """
    folder = Path(directory)
    try:
        config = Eagle3Config.from_hf(read_part_config(folder), target.config.num_layers)
    except ArgumentError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    check_eagle3(config, target.config, str(directory))
    check_embedding(folder, target.model.embed_tokens)
    weight = target.model.embed_tokens.weight
    listed = any(name.startswith("layers.0.") for name in tensor_names(folder))
    model = load_part(
        lambda: make_eagle3(config, listed),
        directory,
        shared=(*NAMES, "embed_tokens.weight"),
        device=weight.device,
        dtype=dtype or weight.dtype,
        rotated=config.attention.qk_rope_head_dim,
    )
    offsets = read_offsets(folder, config.draft_vocab_size, config.vocab_size)
    model.d2t = offsets.to(weight.device)
    return model


def make_eagle3(config: Eagle3Config, listed: bool = False) -> Eagle3Model:
    """Build the network that a config describes, with a layer of its kind."""
    from drafters.gqa_eagle3_model import GQAEagle3Model  # which is made of this module's parts

    return (GQAEagle3Model if config.is_gqa else Eagle3Model)(config, listed)


def save_eagle3(model: Eagle3Model, directory: str | Path) -> None:
    """Write config.json and model.safetensors, d2t and t2d included."""
    config = model.config
    save_mapped(model, model.d2t, config.vocab_size, directory, config.to_hf())
