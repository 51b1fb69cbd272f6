"""The portable backend: plain torch on any device, every mask, dimension and page size.

A step's plan turns the tables into gather indices and a mask once (`specmla.backends.gather`); a
layer's call is then a gather, two batched products and a softmax over the padded batch, without a
loop over requests. Scores, softmax and both products are computed in float32 (float64 for float64).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Capabilities, GraphSupport
from specmla.backends.format_reasons import form_reasons
from specmla.backends.gather import build_gather_plan, plan_buffers
from specmla.backends.reference_inputs import DTYPES, mha_problems, mqa_problems
from specmla.backends.scratch import CpuScratch
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.names import QUANTISED_NAMES
from specmla.cache.formats.plain import quantised
from specmla.errors import require
from specmla.mask import DraftMask
from specmla.metadata import PrefillPart, VerifyPart
from specmla.query import QueryLenSupport
from specmla.query_form import Fp8Query

PREFILL_ROWS = 256
"""Prompt rows attended at a time: bounds the score matrix at H * 256 * S."""


class ReferenceBackend(AttentionBackend):
    """Attends in plain torch; what a CPU runs, and what other backends are compared with.

    Args:
        cache_format: quantised format of the caches to read; rows are dequantised as they are
            gathered, in the dtype that is computed in.
        query_form: of e4m3 queries; the codes are multiplied, the scale is one of the scores.
    """

    capabilities = Capabilities(
        name="reference",
        query_len_support=QueryLenSupport.VARLEN,
        masks=frozenset(DraftMask),
        dtypes=DTYPES,
        device_types=("cpu", "cuda"),
        formats=QUANTISED_NAMES,
        fp8_query=QUANTISED_NAMES,
        graphs=GraphSupport.RAGGED,
        # Timed on a CPU core, 16 heads of 128 + 64 over a rank of 512, 256 to 4096 keys: faster up
        # to 128 rows, slower at 256 rows and few keys. By operations they are even at 171 rows.
        reorder_batch_threshold=128,
        summary="plain torch, float32 arithmetic (float64 for float64), any shape",
    )

    def __init__(
        self, cache_format: CacheFormat | None = None, query_form: Fp8Query | None = None
    ) -> None:
        packed = self.cache_format = quantised(cache_format)
        self._scratch, self.query_form = CpuScratch(), query_form
        require(form_reasons(query_form, packed, self.capabilities.fp8_query), "ReferenceBackend")

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Compute the gather indices and the mask of a step; nothing waits for the device."""
        return dataclasses.replace(part, plan=build_gather_plan(part, num_heads))

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what `plan` reserves at most; rows gathered by a layer's call come on top."""
        return plan_buffers(size)

    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        *,
        softmax_scale: float,
    ) -> AttentionOutput:
        """Attend absorbed queries; see `AttentionBackend.forward_mqa`.

        Raises:
            ArgumentError: shapes, dtypes or page size that disagree, or a part that this backend
                has not planned; all reasons are listed.
        """
        packed, form, found = self.cache_format, self.query_form, []
        if packed is not None and form is not None:
            found = form.problems(q_latent, q_rope)
            q_latent, q_rope = q_latent.to(packed.dtype), q_rope.to(packed.dtype)
            softmax_scale *= form.scale
        found += mqa_problems(q_latent, q_rope, latent_cache, part, packed)
        require(found, "ReferenceBackend.forward_mqa")
        plan = part.plan
        if plan is None:
            return _empty_state(q_latent.shape, q_latent)
        _, num_heads, rank = q_latent.shape
        query = torch.cat((q_latent, q_rope), -1)
        if plan.padded_from is not None:
            query = query.index_select(0, plan.padded_from)
        compute = torch.promote_types(query.dtype, torch.float32)
        cached = self._widen(plan.gather(latent_cache, self._scratch), compute)
        query = query.to(compute).view(cached.shape[0], -1, cached.shape[2])
        bias = plan.bias.to(compute)
        score = torch.baddbmm(bias, query, cached.transpose(1, 2), alpha=softmax_scale)
        out, lse = _attend(score, cached.narrow(2, 0, rank))
        if plan.no_keys is not None:
            out = out.masked_fill(plan.no_keys[..., None], 0.0)
            lse = lse.masked_fill(plan.no_keys, -torch.inf)
        out, lse = out.view(-1, num_heads, rank), lse.view(-1, num_heads)
        if plan.packed_from is not None:
            out, lse = out.index_select(0, plan.packed_from), lse.index_select(0, plan.packed_from)
        return AttentionOutput(out.to(q_latent.dtype), lse.float())

    def _widen(self, cached: Tensor, dtype: torch.dtype) -> Tensor:
        if self.cache_format is not None:
            rows = self.cache_format.dequantise(cached.view(-1, cached.shape[2]), dtype)
            return rows.view(*cached.shape[:2], -1)
        if cached.dtype == dtype or cached.device.type != "cpu":
            return cached.to(dtype)
        return self._scratch.empty(cached.shape, dtype).copy_(cached)

    def forward_mha(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend prompt rows over up-projected keys; see `AttentionBackend.forward_mha`.

        Raises:
            ArgumentError: shapes or dtypes that disagree; all reasons are listed.
        """
        require(mha_problems(query, key, value, part), "ReferenceBackend.forward_mha")
        out, lse = _empty_state((*query.shape[:2], value.shape[2]), query)
        row_at = key_at = 0
        for query_len, seq_len in zip(part.query_lens, part.seq_lens, strict=True):
            keys = slice(key_at, key_at + seq_len)
            for first in range(0, query_len if seq_len else 0, PREFILL_ROWS):
                count = min(PREFILL_ROWS, query_len - first)
                rows = slice(row_at + first, row_at + first + count)
                last_key = seq_len - query_len + first if causal else None
                got = _mha_block(query[rows], key[keys], value[keys], softmax_scale, last_key)
                out[rows], lse[rows] = got.out, got.lse
            row_at, key_at = row_at + query_len, key_at + seq_len
        return AttentionOutput(out, lse)


def _attend(score: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax the scores [X, rows, S] (hidden: -inf) and average the values [X, S, D] by them.

    Gives [X, rows, D] and the natural-log LSE [X, rows]; both are NaN for a row without keys.
    """
    weight = score.softmax(-1)
    # exp(top - lse) is the largest weight: cheaper than a second pass over the exponentials.
    lse = score.amax(-1) - weight.amax(-1).log_()
    return torch.bmm(weight, value), lse


def _empty_state(shape: tuple[int, ...], like: Tensor) -> AttentionOutput:
    lse = torch.full(shape[:2], -torch.inf, dtype=torch.float32, device=like.device)
    return AttentionOutput(like.new_zeros(shape), lse)


def _mha_block(
    query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, last_key: int | None
) -> AttentionOutput:
    """Attend rows of one request, of which row t sees the keys up to `last_key + t` (None: all)."""
    compute = torch.promote_types(query.dtype, torch.float32)
    per_head = query.to(compute).mul(softmax_scale).transpose(0, 1)
    score = torch.bmm(per_head, key.to(compute).permute(1, 2, 0))
    if last_key is not None:
        hidden = score.new_ones(score.shape[1:], dtype=torch.bool).triu_(last_key + 1)
        score.masked_fill_(hidden, -torch.inf)
    out, lse = _attend(score, value.to(compute).transpose(0, 1))
    if last_key is not None and last_key < 0:
        out[:, :-last_key] = 0.0
        lse[:, :-last_key] = -torch.inf
    return AttentionOutput(out.transpose(0, 1).to(query.dtype), lse.T.float())
