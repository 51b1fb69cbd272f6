"""Multi-head Latent Attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), two exact ways.

Dimensions: T rows, D hidden, H heads, C latent (kv_lora_rank), P query/key width without position,
R rotated width, V value width, L query bottleneck, S keys that a row sees.

    q = W_Q h                     [H, P + R]   (W_Q = W_QB norm(W_QA h) with a bottleneck L)
    [c' | k'] = W_KVA h           [C | R]      one latent and one rotated key for all heads
    c, k_rope = norm(c'), RoPE(k')             the cached row [c | k_rope], A = C + R values
    [k_nope | v] = W_KVB c        [H, P + V]   W_UK [H, P, C] and W_UV [H, V, C] are its rows

MHA (prompts) expands the keys: work per key H (P + V) C once, then P + R + V per head and row.
Long context is expanded chunk by chunk (`specmla.prefill`).

    score = scale (q_nope . k_nope + RoPE(q_rope) . k_rope),   out = sum softmax(score) v

MQA (verifies) moves W_KVB to the other side of both sums, so that the cached row itself is key and
value and all H heads of all Q rows of a request read it once:

    q_latent = q_nope W_UK        [H, C]       q_nope . (W_UK c) = (q_nope W_UK) . c
    score = scale (q_latent . c + RoPE(q_rope) . k_rope)
    out   = W_UV (sum softmax(score) c)        [H, V]

The scale is (P + R)^-0.5, times YaRN's factor, in both: absorption does not change it. Both end in
o_proj [D, H V]. Modules carry the Hugging Face names of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specmla.backends.base import AttentionBackend
from specmla.cache.codes import row_reader
from specmla.cache.latent import LatentCache
from specmla.cache.projected import store_projected
from specmla.config import MLAConfig
from specmla.errors import require
from specmla.invariance import step_problems
from specmla.layer_inputs import input_problems
from specmla.metadata import PrefillPart, StepMetadata, VerifyPart
from specmla.prefill import PromptAttention
from specmla.quant_output import QuantOutput
from specmla.rope import RopeAngles
from specmla.row_local import Linear, RMSNorm
from specmla.up_projection import UpProjection

# The norms of the two bottlenecks: fixed in the published models, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class MLAAttention(nn.Module):
    """One MLA layer: projections, absorption and the two paths; the backend attends.

    Attributes:
        batch_invariant: whether `make_batch_invariant` has switched it; refuses steps that are not.
        fused_store: store new rows by `store_projected`. Its kernel rounds once, so that rows may
            differ from those of three steps in the last bits; plain rows, not `as_operators`.
    """

    batch_invariant = fused_store = False

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        self.softmax_scale = config.softmax_scale
        hidden, bias = config.hidden_size, config.attention_bias
        query_width = config.num_heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, query_width, bias=False)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, config.cache_width, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = UpProjection(config)  # or an `E4M3UpProjection`, put in its place
        self.o_proj: nn.Linear = Linear(config.num_heads * config.v_head_dim, hidden, bias=bias)

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        angles: RopeAngles,
        cache: LatentCache,
        layer_id: int,
        metadata: StepMetadata,
        backend: AttentionBackend,
    ) -> Tensor:
        """Store the latent rows of a step, then attend: verify rows by MQA, prompt rows by MHA.

        Short extends count as verify rows, long ones as prompt rows.

        Args:
            hidden: [T, D], normed.
            angles: of `metadata.positions`.
            cache: written at `metadata.slot_mapping` of layer `layer_id`, before it is read.
            layer_id: index into the cache.
            metadata: of this step, shared by all layers.
            backend: attends.

        Returns:
            [T, D], without gradients (`forward_full` has them).

        Raises:
            ArgumentError: another number of rows than `metadata` has, a step or a backend for
                another cache, rows that one of them refuses, or a step that is not batch-invariant
                where the layer is.
        """
        attended = self.attend(hidden, angles, cache, layer_id, metadata, backend)
        projected: Tensor = self.o_proj(attended)
        return projected

    @torch.no_grad()
    def attend(
        self,
        hidden: Tensor,
        angles: RopeAngles,
        cache: LatentCache,
        layer_id: int,
        metadata: StepMetadata,
        backend: AttentionBackend,
        output: QuantOutput | None = None,
    ) -> Tensor:
        """Do all that `forward` does before `o_proj`, for an engine that has that quantised.

        Returns:
            [T, H * V], or the first T rows of `output`, quantised from the model's dtype.

        Raises:
            ArgumentError: as `forward`, or an output of too few rows, of another width, dtype or
                device; all reasons are listed and nothing was stored.
        """
        reasons = input_problems(self.config, hidden, cache, layer_id, metadata, backend, output)
        if self.batch_invariant:
            reasons += step_problems(hidden, cache, metadata, backend, self.fused_store)
        require(reasons, "MLAAttention")
        q_nope, q_rope = self._query(hidden, angles)
        pages = self._store(hidden, angles, cache, layer_id, metadata.slot_mapping)
        verify, prefill, split = metadata.verify, metadata.prefill, metadata.num_verify_rows
        parts = []
        if verify is not None:
            first = (q_nope[:split], q_rope[:split]) if prefill is not None else (q_nope, q_rope)
            fused = output if output is not None and output.fused else None
            parts.append(self.forward_mqa(*first, pages, verify, backend, fused))
        if prefill is not None:
            query = torch.cat((q_nope[split:], q_rope[split:]), dim=-1)
            gather, scale = row_reader(cache, layer_id, codes=backend.query_form is not None)
            parts.append(self.forward_mha(query, gather, prefill, backend, row_scale=scale))
        if not parts:
            parts.append(hidden.new_empty(0, self.config.num_heads * self.config.v_head_dim))
        lifted = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.write(lifted, len(hidden) - len(lifted)) if output is not None else lifted

    def forward_mqa(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        backend: AttentionBackend,
        fused: QuantOutput | None = None,
    ) -> Tensor:
        """Absorb `[T, H, P]`, attend with `[T, H, R]` over `[N, G, A]`, lift to `[T, H * V]`.

        No rows are given back where a `fused` output takes them.
        """
        q_latent = self.kv_b_proj.absorb(q_nope)
        if backend.query_form is not None:
            q_latent, q_rope = backend.query_form.quantise(q_latent, q_rope)
        latent = backend.forward_mqa(
            q_latent, q_rope, latent_cache, part, softmax_scale=self.softmax_scale
        ).out
        if fused is None:
            return self.kv_b_proj.lift(latent)
        self.kv_b_proj.lift_into(fused, latent)
        return latent.new_empty(0, fused.width)

    def forward_mha(
        self,
        query: Tensor,
        gather: Callable[[Tensor, Tensor | None], Tensor],
        part: PrefillPart,
        backend: AttentionBackend,
        *,
        row_scale: float = 1.0,
    ) -> Tensor:
        """Attend `[T, H, P + R]` over rows times `row_scale`, up-projected, to `[T, H * V]`."""
        expand = self.kv_b_proj.expand_rows
        attention = PromptAttention(backend, self.softmax_scale, gather, expand, row_scale)
        return attention.attend(query, part).out.flatten(1)

    def forward_full(self, hidden: Tensor, angles: RopeAngles) -> Tensor:
        """Attend causally within whole sequences `[B, S, D]`, without a cache, with gradients.

        `angles` are those of positions 0 .. S - 1.
        """
        q_nope, q_rope, *rows = self._project(hidden, angles)
        key, value = self.kv_b_proj.expand(*rows)
        query = torch.cat((q_nope, q_rope), dim=-1)
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def absorbed_weights(self) -> tuple[Tensor, Tensor]:
        """View `kv_b_proj` as W_UK `[H, P, C]` and W_UV transposed `[H, C, V]`, for bmm."""
        return self.kv_b_proj.absorbed_weights()

    def _project(self, hidden: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give what `_query` and `_rows` give."""
        return *self._query(hidden, angles), *self._rows(hidden, angles)

    def _query(self, hidden: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor]:
        """Give q_nope [..., H, P] and q_rope [..., H, R]."""
        if (dims := self.config).q_lora_rank is None:
            query = self.q_proj(hidden)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q_nope, q_rope = query.unflatten(-1, (dims.num_heads, dims.qk_head_dim)).split(
            (dims.qk_nope_head_dim, dims.qk_rope_head_dim), dim=-1
        )
        return q_nope, angles.rotate_query(q_rope)

    def _rows(self, hidden: Tensor, angles: RopeAngles) -> tuple[Tensor, Tensor]:
        """Give kv_latent [..., C] and k_rope [..., R]: what is cached."""
        kv_latent, k_rope = self.kv_a_proj_with_mqa(hidden).split(
            (self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=-1
        )
        return self.kv_a_layernorm(kv_latent), angles.rotate_key(k_rope)

    def _store(
        self, hidden: Tensor, angles: RopeAngles, cache: LatentCache, layer_id: int, slots: Tensor
    ) -> Tensor:
        """Store the rows of `hidden` and give the pages, to be read after that."""
        if not self.fused_store:
            return cache.store(layer_id, *self._rows(hidden, angles), slots)
        rows, weight = self.kv_a_proj_with_mqa(hidden), self.kv_a_layernorm.weight
        return store_projected(cache, layer_id, rows, weight, angles, slots, eps=LATENT_NORM_EPS)
