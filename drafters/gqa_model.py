"""A block drafter of grouped-query attention: what most released DFlash and DSpark networks are.

Layers are those of Qwen3 (per-head norms of queries and keys) or Llama (none): pre-norm, residual,
rotary halves. Keys and values of a committed token come from its context row, by the layer's own
`k_proj` and `v_proj`, without `input_layernorm`; everything else is as in `block_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import nn

from drafters.block_model import BlockDraftModel
from drafters.gqa_config import GQAConfig
from specmla import MLAConfig, RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block_config import BlockConfig
    from specmla import RopeAngles


class GQAAttention(nn.Module):
    """Projections and dense attention of H query over G key heads of width d.

    Args:
        config: dimensions.
        input_size: width of the rows that are projected, hidden_size if None.
    """

    def __init__(self, config: GQAConfig, input_size: int | None = None) -> None:
        super().__init__()
        hidden, width, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        given = hidden if input_size is None else input_size
        self.config = config
        self.q_proj = nn.Linear(given, config.num_heads * width, bias=False)
        self.k_proj = nn.Linear(given, config.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(given, config.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * width, hidden, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(width, eps=eps)
            self.k_norm = nn.RMSNorm(width, eps=eps)

    def query(self, rows: Tensor, angles: RopeAngles) -> Tensor:
        """Give queries `[..., H, d]` of rows at the positions of `angles`."""
        query = self.q_proj(rows).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        return angles.rotate_query(self.q_norm(query) if self.config.qk_norm else query)

    def key_value(self, rows: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor]:
        """Give keys and values `[..., G, d]` of rows `[..., D]` at the positions of `angles`."""
        heads = (self.config.num_kv_heads, self.config.head_dim)
        key = self.k_proj(rows).unflatten(-1, heads)
        key = self.k_norm(key) if self.config.qk_norm else key
        return angles.rotate_query(key), self.v_proj(rows).unflatten(-1, heads)

    def forward(
        self, rows: Tensor, angles: RopeAngles, context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Attend from rows `[B, n, D]` over context and themselves.

        Args:
            rows: normed.
            angles: of their positions.
            context: keys and values `[B, S, G, d]`.
            mask: [B, 1, n or 1, S + n] bool, what is seen.
        """
        own = self.key_value(rows, angles)
        key, value = (torch.cat(pair, dim=1) for pair in zip(context, own, strict=True))
        projected: Tensor = self.o_proj(mix_heads(self.query(rows, angles), key, value, mask))
        return projected


def mix_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from `[B, n, H, d]` over `[B, S, G, d]`; give the heads side by side `[B, n, H * d]`.

    Args:
        query: H / G heads in a row share a key head.
        key: keys.
        value: values.
        mask: [B, 1, n or 1, S] bool, what is seen; None for the causal half, of n = S rows.
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out.transpose(1, 2).flatten(2)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class GQALayer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: GQAConfig, intermediate_size: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = GQAAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, intermediate_size)

    def forward(
        self, x: Tensor, angles: RopeAngles, context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Map block rows `[B, n, D]`, see `GQAAttention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), angles, context, mask)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class GQABlockModel(BlockDraftModel):
    """Context projection, grouped-query layers and heads; see `BlockDraftModel`."""

    def _make_layers(self, config: BlockConfig) -> nn.ModuleList:
        dims = config.attention
        assert isinstance(dims, GQAConfig)
        return nn.ModuleList(
            GQALayer(dims, config.intermediate_size) for _ in range(config.num_layers)
        )

    def _make_rotary(self, config: BlockConfig) -> RotaryEmbedding:
        return RotaryEmbedding(cast("MLAConfig", config.attention))  # has what is asked of it

    def layer(self, index: int) -> GQALayer:
        """Give one layer."""
        return cast("GQALayer", self.layers[index])
