"""Text from the target, thousands of sequences at once: absorbed MLA over a dense latent cache.

It runs on weights by their checkpoint names. Scores of head h come from the latent itself,
(q_nope W_UK) . c + q_rope . k_rope, so that a step reads C + R values a cached token (DeepSeek-V2,
arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specmla.models.config import DeepseekConfig


class LatentSampler:
    """Continues token sequences; all have the same length, each its own temperature.

    Args:
        weights: a dense DeepSeek-V3 state dict with tied embeddings and a plain `q_proj`.
        config: its sizes.
        dtype: of the computation.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], config: DeepseekConfig, dtype: torch.dtype
    ) -> None:
        self._w = {name: tensor.detach().to(dtype) for name, tensor in weights.items()}
        self._config, self._dims, self._dtype = config, config.attention, dtype

    @torch.inference_mode()
    def extend(
        self, prompts: Tensor, length: int, temperature: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Continue `prompts` to `length` tokens.

        Args:
            prompts: [B, S0] int64, S0 >= 1.
            length: tokens of a finished sequence, at least S0.
            temperature: [B] float; 0 takes the likeliest token.
            generator: on the prompts' device.

        Returns:
            [B, length] int64, the prompts included.
        """
        count, given = prompts.shape
        tokens = prompts.new_zeros(count, length)
        tokens[:, :given] = prompts
        cache = torch.empty(
            self._config.num_layers,
            count,
            length,
            self._dims.cache_width,
            dtype=self._dtype,
            device=prompts.device,
        )
        for position in range(length - 1):
            hidden = self._step(tokens[:, position], position, cache)
            if position + 1 >= given:
                logits = F.linear(hidden, self._w["model.embed_tokens.weight"]).float()
                noise = torch.empty_like(logits).exponential_(generator=generator)
                noise = noise.clamp_min_(1e-30).log_()
                tokens[:, position + 1] = (logits - temperature[:, None] * noise).argmax(-1)
        return tokens

    def _step(self, tokens: Tensor, position: int, cache: Tensor) -> Tensor:
        """Run one token of every sequence; [B] ids in, [B, D] after the final norm out."""
        x = self._w["model.embed_tokens.weight"][tokens]
        cos, sin = self._angles(position, x.device)
        for index in range(self._config.num_layers):
            name = f"model.layers.{index}."
            normed = self._norm(x, name + "input_layernorm")
            x = x + self._attend(normed, name + "self_attn.", (cos, sin), cache[index], position)
            normed = self._norm(x, name + "post_attention_layernorm")
            gate = F.silu(self._linear(normed, name + "mlp.gate_proj"))
            up = self._linear(normed, name + "mlp.up_proj")
            x = x + self._linear(gate * up, name + "mlp.down_proj")
        return self._norm(x, "model.norm")

    def _attend(
        self, x: Tensor, name: str, angles: tuple[Tensor, Tensor], cache: Tensor, position: int
    ) -> Tensor:
        dims = self._dims
        heads, rank, nope = dims.num_heads, dims.kv_lora_rank, dims.qk_nope_head_dim
        query = self._linear(x, name + "q_proj").unflatten(-1, (heads, dims.qk_head_dim))
        compressed = self._linear(x, name + "kv_a_proj_with_mqa")
        cache[:, position, :rank] = self._norm(compressed[:, :rank], name + "kv_a_layernorm")
        cache[:, position, rank:] = _rotate(compressed[:, rank:], *angles)
        up = self._w[name + "kv_b_proj.weight"].view(heads, nope + dims.v_head_dim, rank)
        q_latent = torch.einsum("bhp,hpc->bhc", query[..., :nope], up[:, :nope])
        q_latent = torch.cat((q_latent, _rotate(query[..., nope:], *angles)), dim=-1)
        seen = cache[:, : position + 1]
        scores = torch.bmm(q_latent, seen.mT).float() * dims.softmax_scale
        mixed = torch.bmm(scores.softmax(-1).to(self._dtype), seen[..., :rank])
        lifted = torch.einsum("bhc,hvc->bhv", mixed, up[:, nope:])
        return self._linear(lifted.flatten(1), name + "o_proj")

    def _angles(self, position: int, device: torch.device) -> tuple[Tensor, Tensor]:
        width, theta = self._dims.qk_rope_head_dim, self._dims.rope_theta
        pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
        angle = position * theta ** (-pairs / width)
        return angle.cos(), angle.sin()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[name + ".weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name + ".weight"], self._dims.rms_norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dim."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)
