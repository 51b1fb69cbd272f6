"""The network of a block drafter (DFlash, DSpark) with MLA layers.

Context: the outputs of m target layers, side by side, become one row a committed token,

    c = hidden_norm(fc [h_1 ; ... ; h_m])

whose latent row in each layer l is that of MLA, without a query and without `input_layernorm`:
[kv_a_layernorm(W_a c) | RoPE(W_r c)] with the layer's own `kv_a_proj_with_mqa`. A block
[anchor, mask ...] runs through the layers (pre-norm, residual); each of its rows sees all context
and all rows of the block. `norm` and the target's head give logits U_j.

DSpark adds a sequential head, logits_j = U_j + W_2 W_1[x_{j-1}] with x_0 the anchor, and a
confidence c_j = sigmoid(w . [h_j ; W_1[x_{j-1}]]), an estimate of how likely draft j is accepted.

A network of a reduced vocabulary has a head of its own, whose id j is the target's j + d2t[j]; W_2
is over its ids as well. What they give is spread over the target's ids, -inf where it knows none.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.block_config import BlockConfig, check_target, read_block_config
from drafters.file_tensors import check_embedding, is_copy, tensor_names
from drafters.gqa_config import GQAConfig
from drafters.vocab_map import NAMES, read_offsets, save_mapped
from specmla import (
    AttentionBackend,
    DeepseekConfig,
    DeepseekDecoderLayer,
    DeepseekForCausalLM,
    LatentCache,
    RopeAngles,
    RotaryEmbedding,
    StepMetadata,
    load_part,
    save_part,
)

_Q_NORM = "layers.0.self_attn.q_norm.weight"


class MarkovHead(nn.Module):
    """A bias of rank r on the logits, from the token before."""

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """One number from a row's state and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class BlockDraftModel(nn.Module):
    """Context projection, layers and heads; embedding and vocabulary head are the target's.

    Attributes:
        d2t: [draft_vocab_size] int64, what is added to a draft id to give the target's, if the
            vocabulary is a reduced one.
    """

    d2t: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.attention.hidden_size, config.attention.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = self._make_layers(config)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        count = config.draft_vocab_size or config.vocab_size
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(hidden, count, bias=False)
            self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64), persistent=False)
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank, count)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(hidden + config.markov_rank)
        self.rotary = self._make_rotary(config)

    def _make_layers(self, config: BlockConfig) -> nn.ModuleList:
        decoder = DeepseekConfig(
            config.mla, config.num_layers, config.vocab_size, config.intermediate_size, 1
        )
        return nn.ModuleList(DeepseekDecoderLayer(decoder, i) for i in range(config.num_layers))

    def _make_rotary(self, config: BlockConfig) -> RotaryEmbedding:
        return RotaryEmbedding(config.mla)

    def context(self, states: Tensor) -> Tensor:
        """Map target states `[..., m * D]` to context rows `[..., D]`."""
        rows: Tensor = self.hidden_norm(self.fc(states))
        return rows

    def context_latent(
        self, layer_id: int, context: Tensor, angles: RopeAngles
    ) -> tuple[Tensor, Tensor]:
        """Give kv_latent `[..., C]` and k_rope `[..., R]` of context rows in one layer."""
        layer, dims = self.layers[layer_id], self.config.mla
        assert isinstance(layer, DeepseekDecoderLayer)
        attention = layer.self_attn
        widths = (dims.kv_lora_rank, dims.qk_rope_head_dim)
        latent, rope = attention.kv_a_proj_with_mqa(context).split(widths, dim=-1)
        return attention.kv_a_layernorm(latent), angles.rotate_key(rope)

    @torch.no_grad()
    def forward(
        self,
        embedded: Tensor,
        metadata: StepMetadata,
        cache: LatentCache,
        backend: AttentionBackend,
    ) -> Tensor:
        """Run the rows of blocks, `[T, D]`, over the cached context; states for the head."""
        angles = self.rotary.at(metadata.positions, embedded.dtype)
        hidden = embedded
        for layer_id, layer in enumerate(self.layers):
            hidden = layer(hidden, angles, cache, layer_id, metadata, backend)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor, target: DeepseekForCausalLM) -> Tensor:
        """Map states `[..., D]` to logits `[..., W]`, by the target's head or its own."""
        if self.config.draft_vocab_size is None:
            return target.logits(hidden)
        own = self.lm_head(hidden.to(self.lm_head.weight.dtype)).to(hidden.dtype)
        return self._spread(own, -torch.inf)

    def _spread(self, own: Tensor, other: float) -> Tensor:
        """Give values `[..., draft_vocab_size]` their places among the target's ids."""
        ids = torch.arange(len(self.d2t), device=own.device) + self.d2t
        whole = own.new_full((*own.shape[:-1], self.config.vocab_size), other)
        return whole.index_copy_(-1, ids, own)

    @property
    def has_markov(self) -> bool:
        """Whether the drafts of a block depend on each other."""
        return self.config.markov_rank > 0

    def markov_state(self, previous: Tensor) -> Tensor:
        """Look up W_1 `[..., r]` of the tokens before `[...]`."""
        state: Tensor = self.markov_head.markov_w1(previous)
        return state

    def markov_logits(self, state: Tensor) -> Tensor:
        """Give W_2 s `[..., W]`, what the token before adds to the logits."""
        added: Tensor = self.markov_head.markov_w2(state)
        return added if self.config.draft_vocab_size is None else self._spread(added, 0.0)

    def confidence_logit(self, hidden: Tensor, state: Tensor | None) -> Tensor:
        """Give w . [h ; s] `[...]`; its sigmoid is the confidence."""
        features = hidden if state is None else torch.cat((hidden, state), dim=-1)
        score: Tensor = self.confidence_head.proj(features.to(self.confidence_head.proj.weight))
        return score.squeeze(-1)


def load_block_model(
    directory: str | Path, target: DeepseekForCausalLM, dtype: torch.dtype | None = None
) -> BlockDraftModel:
    """Load a DFlash or DSpark checkpoint on the target's device; a `GQABlockModel` where its
    layers are grouped-query ones.

    Raises:
        CheckpointError: damaged files, other tensors, or a config that can't be served with this
            target; every reason is named.
        ArgumentError: `dtype` is not a floating type.
    """
    folder, config = Path(directory), read_block_config(directory)
    check_target(config, target.config, str(directory))
    config = _as_files_have_it(config, folder, target)
    weight, reduced = target.model.embed_tokens.weight, config.draft_vocab_size
    model = load_part(
        lambda: make_block_model(config),
        directory,
        shared=("embed_tokens.weight", *NAMES, *(("lm_head.weight",) if reduced is None else ())),
        device=weight.device,
        dtype=dtype or weight.dtype,
        least=config.num_layers,
        rotated=config.attention.qk_rope_head_dim,
    )
    if reduced is not None:
        model.d2t = read_offsets(folder, reduced, config.vocab_size).to(weight.device)
    return model


def _as_files_have_it(
    config: BlockConfig, folder: Path, target: DeepseekForCausalLM
) -> BlockConfig:
    """Settle what config.json does not say: a head of its own for all ids, norms by head.

    Raises:
        CheckpointError: an embedding that is not the target's.
    """
    check_embedding(folder, target.model.embed_tokens)
    head = getattr(target, "lm_head", target.model.embed_tokens)  # which may be tied
    if config.draft_vocab_size is None and not is_copy(folder, "lm_head.weight", head):
        config = dataclasses.replace(config, draft_vocab_size=config.vocab_size)
    dims = config.attention
    if isinstance(dims, GQAConfig) and _Q_NORM in tensor_names(folder):  # "llama", it may say
        config = dataclasses.replace(config, attention=dataclasses.replace(dims, qk_norm=True))
    return config


def pair_problems(
    model: object, draft: object, kind: type[BlockDraftModel] = BlockDraftModel
) -> list[str]:
    """List which of a target and its block network is none, as where they are swapped."""
    pair = (("model", model, DeepseekForCausalLM), ("draft", draft, kind))
    return [
        f"{name} is a {type(got).__name__}, accepted is a {wanted.__name__}"
        for name, got, wanted in pair
        if not isinstance(got, wanted)
    ]


def make_block_model(config: BlockConfig) -> BlockDraftModel:
    """Build the network that a config describes, with layers of its kind."""
    from drafters.gqa_model import GQABlockModel  # which is made of this module's parts

    is_gqa = isinstance(config.attention, GQAConfig)
    return GQABlockModel(config) if is_gqa else BlockDraftModel(config)


def save_block_model(model: BlockDraftModel, directory: str | Path) -> None:
    """Write config.json and model.safetensors; embedding and head stay with the target, but for
    the head and the maps (d2t, t2d) of a reduced vocabulary."""
    config = model.config
    if config.draft_vocab_size is None:
        save_part(model, directory, config.to_hf())
    else:
        save_mapped(model, model.d2t, config.vocab_size, directory, config.to_hf())
