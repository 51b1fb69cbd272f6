"""An EAGLE-3 head of a grouped-query layer: what most released ones are.

The layer is Llama's, or Qwen3's with norms of queries and keys by head; everything around it is as
in `eagle3_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from drafters.eagle3_model import Eagle3Model, HeadLayer
from drafters.gqa_config import GQAConfig
from drafters.gqa_model import GQAAttention, GQALayer

if TYPE_CHECKING:
    from drafters.eagle3_config import Eagle3Config


class GQAEagle3Layer(HeadLayer, GQALayer):
    """A grouped-query layer whose attention looks at embedding and state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        dims = config.attention
        assert isinstance(dims, GQAConfig)
        super().__init__(dims, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(dims.hidden_size, eps=dims.rms_norm_eps)
        self.self_attn = GQAAttention(dims, input_size=2 * dims.hidden_size)


class GQAEagle3Model(Eagle3Model):
    """Fusion, a grouped-query layer and a head of its own, see `Eagle3Model`."""

    def _make_layer(self, config: Eagle3Config) -> nn.Module:
        return GQAEagle3Layer(config)

    @property
    def attention(self) -> GQAAttention:
        """The attention of its layer."""
        return cast("GQAEagle3Layer", cast("object", self.layer)).self_attn
