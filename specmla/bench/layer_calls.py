"""The parts of one MLA layer's verify as calls, each on a layer and a cache that are given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.cache.latent import LatentCache
from specmla.cache.projected import store_projected
from specmla.config import MLAConfig
from specmla.layer import LATENT_NORM_EPS, MLAAttention
from specmla.metadata import StepMetadata, VerifyPart
from specmla.rope import RopeAngles, RotaryEmbedding

PARTS = ("store", "absorb", "attend", "lift")
WHOLE = ("row", "fused", "four", "layer")
"""row: norm, rotation and store of the projected rows; fused: the same by `store_projected`."""


class LayerCalls(NamedTuple):
    """Inputs of T rows, in the strides that the layer gives them; data is standard normal.

    Attributes:
        backend, metadata: of the step; verify rows alone.
        q_nope: [T, H, P], a slice of [T, H, P + R]. q_latent: [T, H, C]. q_rope: [T, H, R].
        projected: [T, C + R], a row as projected or as cached. latent: [T, H, C]. hidden: [T, D].
        angles: of the step's positions.
    """

    backend: AttentionBackend
    metadata: StepMetadata
    q_nope: Tensor
    q_latent: Tensor
    q_rope: Tensor
    projected: Tensor
    latent: Tensor
    hidden: Tensor
    angles: RopeAngles

    @classmethod
    def make(
        cls,
        dims: MLAConfig,
        backend: AttentionBackend,
        metadata: StepMetadata,
        q_latent: Tensor,
        q_rope: Tensor,
    ) -> LayerCalls:
        """Draw what the queries of the attention don't say."""
        rows = metadata.num_rows
        shape = (rows, dims.num_heads)
        q_nope = _normal(q_latent, *shape, dims.qk_head_dim)[..., : dims.qk_nope_head_dim]
        return cls(
            backend,
            metadata,
            q_nope,
            q_latent,
            q_rope,
            _normal(q_latent, rows, dims.cache_width),
            _normal(q_latent, *shape, dims.kv_lora_rank),
            _normal(q_latent, rows, dims.hidden_size),
            RotaryEmbedding(dims).at(metadata.positions, q_latent.dtype),
        )

    @property
    def part(self) -> VerifyPart:
        """The verify rows, all there are."""
        assert self.metadata.verify is not None
        return self.metadata.verify

    def store(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Write the new rows."""
        return cache.store(0, *self._halves(layer), self.metadata.slot_mapping)

    def row(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Norm, rotate and write the new rows, a step after another."""
        latent, key = self._halves(layer)
        normed = layer.kv_a_layernorm(latent)
        turned = self.angles.rotate_key(key)
        return cache.store(0, normed, turned, self.metadata.slot_mapping)

    def fused(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Do what `row` does, in one kernel on a GPU."""
        weight, slots = layer.kv_a_layernorm.weight, self.metadata.slot_mapping
        return store_projected(
            cache, 0, self.projected, weight, self.angles, slots, eps=LATENT_NORM_EPS
        )

    def absorb(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Multiply the queries by W_UK."""
        return layer.kv_b_proj.absorb(self.q_nope)

    def attend(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Attend over the cache."""
        return self._attend(self.q_latent, layer, cache)

    def lift(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Multiply latents by W_UV."""
        return layer.kv_b_proj.lift(self.latent)

    def four(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Do all four, each with what the one before it gave."""
        self.store(layer, cache)
        return layer.kv_b_proj.lift(self._attend(self.absorb(layer, cache), layer, cache))

    def layer(self, layer: MLAAttention, cache: LatentCache) -> Tensor:
        """Run the module, projections and output included."""
        out: Tensor = layer(self.hidden, self.angles, cache, 0, self.metadata, self.backend)
        return out

    def _halves(self, layer: MLAAttention) -> tuple[Tensor, Tensor]:
        rank = layer.config.kv_lora_rank
        return self.projected[:, :rank], self.projected[:, rank:]

    def _attend(self, q_latent: Tensor, layer: MLAAttention, cache: LatentCache) -> Tensor:
        got = self.backend.forward_mqa(
            q_latent, self.q_rope, cache.layer(0), self.part, softmax_scale=layer.softmax_scale
        )
        return got.out


def _normal(like: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
