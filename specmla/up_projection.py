"""`kv_b_proj`, which makes keys and values of latents, and its absorbed forms.

W_KVB [H * (P + V), C]: the rows of a head are its W_UK [P, C], then its W_UV [V, C].
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.config import MLAConfig
from specmla.ops import lift_heads
from specmla.prompt_keys import PromptKeys
from specmla.quant_output import QuantOutput
from specmla.row_local import Linear, multiply_heads


class UpProjection(Linear):
    """Up-projects latents; the absorbed weights are views of `weight`.

    They take no memory, keep its address and are never older than it.
    """

    def __init__(self, config: MLAConfig) -> None:
        rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        super().__init__(config.kv_lora_rank, rows, bias=False)
        self.config = config

    def absorbed_weights(self) -> tuple[Tensor, Tensor]:
        """View W_UK `[H, P, C]` and W_UV transposed `[H, C, V]`, for bmm."""
        dims = self.config
        w_uk, w_uv = self.weight.unflatten(0, (dims.num_heads, -1)).split(
            (dims.qk_nope_head_dim, dims.v_head_dim), dim=1
        )
        return w_uk, w_uv.transpose(1, 2)

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Turn queries `[T, H, P]` into queries of latents `[T, H, C]`."""
        w_uk, _ = self.absorbed_weights()
        if self.batch_invariant:
            return multiply_heads(q_nope, w_uk)
        return torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)

    def lift(self, latent: Tensor) -> Tensor:
        """Turn attended latents `[T, H, C]` into values `[T, H * V]`.

        Without gradients the values are not copied, and the bits are the same compiled or not.
        """
        _, w_uv_t = self.absorbed_weights()
        if self.batch_invariant:
            return multiply_heads(latent, w_uv_t).flatten(1)
        if torch.is_grad_enabled():
            return torch.bmm(latent.transpose(0, 1), w_uv_t).transpose(0, 1).flatten(1)
        if torch.compiler.is_compiling():
            lifted: Tensor = torch.ops.specmla.lift(latent, w_uv_t)
            return lifted
        return lift_heads(latent, w_uv_t)

    def expand(self, kv_latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project [..., C] and [..., R] to keys [..., H, P + R] and values [..., H, V]."""
        k_nope, value = self._heads(kv_latent)
        shared = k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], k_rope.shape[-1])
        return torch.cat((k_nope, shared), dim=-1), value

    def expand_rows(self, rows: Tensor) -> PromptKeys:
        """Up-project cached rows [n, A], without a copy; e4m3 codes are exact in any dtype."""
        if rows.dtype == torch.float8_e4m3fn:
            rows = rows.to(self.dtype)
        dims = self.config
        latent, rope = rows.split((dims.kv_lora_rank, dims.qk_rope_head_dim), dim=-1)
        k_nope, value = self._heads(latent)
        return PromptKeys(k_nope, rope, value)

    def _heads(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project [..., C]; view the result as [..., H, P] and [..., H, V]."""
        dims = self.config
        k_nope, value = (
            self(kv_latent)
            .unflatten(-1, (dims.num_heads, -1))
            .split((dims.qk_nope_head_dim, dims.v_head_dim), dim=-1)
        )
        return k_nope, value

    def lift_into(self, output: QuantOutput, latent: Tensor) -> None:
        """Lift latents `[T, H, C]` into the first T rows of a fused output."""
        output.lift(latent, self.absorbed_weights()[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model: of what goes in and comes out."""
        return self.weight.dtype
