"""The portable backend: plain torch on any device, every mask, dimension and page size.

A step's plan turns the tables into gather indices and a mask once (`specmla.backends.gather`); a
layer's call is then a gather, two batched products and a softmax over the padded batch, without a
loop over requests. Scores, softmax and both products are computed in float32 (float64 for float64).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Capabilities
from specmla.backends.gather import GatherPlan, build_gather_plan, plan_buffers
from specmla.backends.scratch import CpuScratch
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.cache.formats.base import CacheFormat, byte_problems
from specmla.cache.formats.names import QUANTISED_NAMES
from specmla.cache.formats.plain import quantised
from specmla.errors import require
from specmla.mask import DraftMask
from specmla.metadata import PrefillPart, VerifyPart
from specmla.query import QueryLenSupport

PREFILL_ROWS = 256
"""Prompt rows attended at a time: bounds the score matrix at H * 256 * S."""


class ReferenceBackend(AttentionBackend):
    """Attends in plain torch; what a CPU runs, and what other backends are compared with.

    Args:
        cache_format: quantised format of the caches to read; rows are dequantised as they are
            gathered, in the dtype that is computed in.
    """

    capabilities = Capabilities(
        name="reference",
        query_len_support=QueryLenSupport.VARLEN,
        masks=frozenset(DraftMask),
        dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        device_types=("cpu", "cuda"),
        formats=QUANTISED_NAMES,
        # Timed on a CPU core, 16 heads of 128 + 64 over a rank of 512, 256 to 4096 keys: faster up
        # to 128 rows, slower at 256 rows and few keys. By operations they are even at 171 rows.
        reorder_batch_threshold=128,
        summary="plain torch, float32 arithmetic (float64 for float64), any shape",
    )

    def __init__(self, cache_format: CacheFormat | None = None) -> None:
        self._scratch = CpuScratch()
        self.cache_format = quantised(cache_format)

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
        found = _mqa_problems(q_latent, q_rope, latent_cache, part, self.cache_format)
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
        require(_mha_problems(query, key, value, part), "ReferenceBackend.forward_mha")
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


def _mqa_problems(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    format: CacheFormat | None,
) -> list[str]:
    if format is None:
        found = _tensor_problems(q_latent=q_latent, q_rope=q_rope, latent_cache=latent_cache)
    else:
        found = _tensor_problems(q_latent=q_latent, q_rope=q_rope)
        found += byte_problems(format, q_latent, q_rope, latent_cache)
    if q_latent.dim() == 0 or q_rope.dim() == 0:
        return [*found, "q_latent and q_rope have no dimension, accepted are three"]
    if q_latent.dim() != 3 or q_latent.shape[0] != part.num_rows or not q_latent.shape[1]:
        found.append(f"q_latent is {tuple(q_latent.shape)}, accepted is [T={part.num_rows}, H, C]")
    if q_rope.dim() != 3 or q_rope.shape[:2] != q_latent.shape[:2]:
        found.append(
            f"q_rope is {tuple(q_rope.shape)}, accepted is {tuple(q_latent.shape[:2])} + R"
        )
    width = format.bytes_per_row if format else q_latent.shape[-1] + q_rope.shape[-1]
    if latent_cache.dim() != 3 or latent_cache.shape[1:] != (part.page_size, width):
        found.append(
            f"latent_cache is {tuple(latent_cache.shape)}, accepted is "
            f"[N, G={part.page_size}, {'bytes' if format else 'C + R'}={width}]"
        )
    if (
        isinstance(part.plan, GatherPlan)
        and q_latent.dim() == 3
        and q_latent.shape[1] != part.plan.num_heads
    ):
        found.append(
            f"q_latent has {q_latent.shape[1]} heads, the step was planned for "
            f"{part.plan.num_heads}"
        )
    sees_nothing = not part.num_rows or not part.max_seq_len
    if not isinstance(part.plan, GatherPlan) and not (part.plan is None and sees_nothing):
        found.append(f"part.plan is {type(part.plan).__name__}, accepted is what plan() gives")
    return found


def _mha_problems(query: Tensor, key: Tensor, value: Tensor, part: PrefillPart) -> list[str]:
    rows, keys = sum(part.query_lens), sum(part.seq_lens)
    found = _tensor_problems(query=query, key=key, value=value)
    if query.dim() != 3 or query.shape[0] != rows:
        found.append(f"query is {tuple(query.shape)}, accepted is [T={rows}, H, P + R]")
    if key.shape != (keys, *query.shape[1:]):
        found.append(f"key is {tuple(key.shape)}, accepted is {(keys, *query.shape[1:])}")
    if value.dim() != 3 or value.shape[:2] != key.shape[:2]:
        found.append(f"value is {tuple(value.shape)}, accepted is {tuple(key.shape[:2])} + V")
    return found


def _tensor_problems(**tensors: Tensor) -> list[str]:
    found: list[str] = []
    accepted, first = ReferenceBackend.capabilities.dtypes, next(iter(tensors.values()))
    if first.dtype in accepted and all(
        t.dtype == first.dtype and t.device == first.device for t in tensors.values()
    ):
        return found
    dtypes = {name: str(t.dtype) for name, t in tensors.items()}
    if len(set(dtypes.values())) > 1 or first.dtype not in accepted:
        found.append(f"dtypes are {dtypes}, accepted is one dtype of {[str(d) for d in accepted]}")
    devices = {name: str(t.device) for name, t in tensors.items()}
    if len(set(devices.values())) > 1:
        found.append(f"devices are {devices}, accepted is one device")
    return found
