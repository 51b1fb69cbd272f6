"""The DeepSeek-V2/V3 decoder: embedding, MLA and MLP layers with residuals, norm, head.

Modules carry the Hugging Face names. `forward` serves a step from the paged cache; `forward_full`
runs whole sequences without a cache, with gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specmla.backends.base import AttentionBackend
from specmla.cache.latent import LatentCache
from specmla.layer import MLAAttention
from specmla.metadata import StepMetadata
from specmla.models.config import DeepseekConfig
from specmla.models.moe import DeepseekMLP, DeepseekMoE, DeepseekRouter
from specmla.models.states import FINAL, StateCollector
from specmla.rope import RopeAngles, RotaryEmbedding
from specmla.row_local import Linear, RMSNorm, multiply


class DeepseekDecoderLayer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: DeepseekConfig, layer_id: int) -> None:
        super().__init__()
        hidden, eps = config.attention.hidden_size, config.attention.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.self_attn = MLAAttention(config.attention)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        self.mlp: DeepseekMoE | DeepseekMLP
        if config.moe is not None and config.is_moe_layer(layer_id):
            self.mlp = DeepseekMoE(hidden, config.moe)
        else:
            self.mlp = DeepseekMLP(hidden, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        angles: RopeAngles,
        cache: LatentCache,
        layer_id: int,
        metadata: StepMetadata,
        backend: AttentionBackend,
    ) -> Tensor:
        """Map `[T, D]` to `[T, D]`, see `MLAAttention.forward`."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, angles, cache, layer_id, metadata, backend)
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added

    def forward_full(self, hidden: Tensor, angles: RopeAngles) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`, see `MLAAttention.forward_full`."""
        hidden = hidden + self.self_attn.forward_full(self.input_layernorm(hidden), angles)
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class DeepseekModel(nn.Module):
    """The decoder up to and including the final norm."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.attention.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekDecoderLayer(config, layer_id) for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.attention.hidden_size, eps=config.attention.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.attention)

    def forward(
        self,
        token_ids: Tensor,
        metadata: StepMetadata,
        cache: LatentCache,
        backend: AttentionBackend,
        states: StateCollector | None = None,
    ) -> Tensor:
        """Map the token ids `[T]` of a step to hidden states `[T, D]`."""
        hidden = self.embed_tokens(token_ids)
        angles = self.rotary.at(metadata.positions, hidden.dtype)
        for layer_id, layer in enumerate(self.layers):
            hidden = layer(hidden, angles, cache, layer_id, metadata, backend)
            if states is not None:
                states.keep(layer_id, hidden)
        normed: Tensor = self.norm(hidden)
        if states is not None:
            states.keep(FINAL, normed)
        return normed

    def forward_full(self, token_ids: Tensor, states: StateCollector | None = None) -> Tensor:
        """Map whole sequences `[B, S]` from position 0 to hidden states `[B, S, D]`."""
        hidden = self.embed_tokens(token_ids)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        angles = self.rotary.at(positions, hidden.dtype)
        for layer_id, layer in enumerate(self.layers):
            assert isinstance(layer, DeepseekDecoderLayer)
            hidden = layer.forward_full(hidden, angles)
            if states is not None:
                states.keep(layer_id, hidden)
        normed: Tensor = self.norm(hidden)
        if states is not None:
            states.keep(FINAL, normed)
        return normed


class DeepseekForCausalLM(nn.Module):
    """The decoder with its head; a tied head is the embedding itself, not a second parameter.

    Attributes:
        batch_invariant: whether `make_batch_invariant` has switched it.
    """

    batch_invariant = False

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DeepseekModel(config)
        if not config.tie_word_embeddings:
            hidden = config.attention.hidden_size
            self.lm_head = Linear(hidden, config.vocab_size, bias=False)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        metadata: StepMetadata,
        cache: LatentCache,
        backend: AttentionBackend,
        states: StateCollector | None = None,
    ) -> Tensor:
        """Serve a step: store its rows in the cache and give their final hidden states.

        Args:
            token_ids: [T], in the order of `metadata`.
            metadata: of this step.
            cache: written and read, one layer of it per decoder layer.
            backend: attends.
            states: keeps the hidden states that a drafter asked for, those of all T rows.

        Returns:
            [T, D] after the final norm, without gradients; `logits` takes any rows of it.
        """
        hidden: Tensor = self.model(token_ids, metadata, cache, backend, states)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states `[..., D]` to logits `[..., W]`, in their dtype."""
        tied = self.config.tie_word_embeddings
        weight = (self.model.embed_tokens if tied else self.lm_head).weight
        if self.batch_invariant:
            return multiply(hidden, weight)
        return nn.functional.linear(hidden, weight)

    def forward_full(self, token_ids: Tensor) -> Tensor:
        """Map whole sequences `[B, S]` to logits `[B, S, W]`, with gradients."""
        return self.logits(self.model.forward_full(token_ids))

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw weight matrices from a normal of deviation `std`; norms are 1, biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | DeepseekRouter):
                module.weight.normal_(std=std, generator=generator)
            if isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
            if isinstance(module, DeepseekRouter) and hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.zero_()
