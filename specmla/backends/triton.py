"""The packed Triton backend: ragged verify rows in one launch, every mask, prompts by MHA."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Capabilities, Requirements
from specmla.errors import require
from specmla.kernels import inputs
from specmla.kernels.launch import (
    LaunchEntry,
    choose_num_splits,
    describe_device,
    find_entry,
    reserve,
)
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport

if TYPE_CHECKING:
    from specmla.metadata import PrefillPart, VerifyPart


class TritonBackend(AttentionBackend):
    """Attends by the packed kernel: a request's rows share tiles, the cache is read once a tile.

    Args:
        num_splits: splits of every request instead of the rule (tests, sweeps, fixed results).
        config: launch entry of the packed kernel instead of the table's.
    """

    capabilities = Capabilities(
        name="triton",
        query_len_support=QueryLenSupport.VARLEN,
        masks=frozenset(DraftMask),
        dtypes=inputs.DTYPES,
        device_types=("cuda", "cpu"),
        page_size_multiple=inputs.PAGE_MULTIPLE,
        ranks=inputs.RANKS,
        rope_dims=inputs.ROPE_DIMS,
        min_capability=(8, 0),
        priority=20,
        summary="packed rows of ragged requests, split keys, all masks; the CPU only interprets",
    )

    def __init__(self, num_splits: int | None = None, config: LaunchEntry | None = None) -> None:
        require(
            [f"num_splits is {num_splits}, accepted are None and values >= 1"]
            if num_splits is not None and num_splits < 1
            else [],
            "TritonBackend",
        )
        self.num_splits, self.config = num_splits, config

    def unavailable(self) -> list[str]:
        """Report a missing triton package."""
        found = importlib.util.find_spec("triton") is not None
        return [] if found else ["the package triton is not installed"]

    def problems(self, need: Requirements) -> list[str]:
        """List what is in the way, the interpreter's limits on a CPU included."""
        found = super().problems(need)
        if self.unavailable():
            return found
        from specmla.kernels.prims import INTERPRETED

        return found + inputs.device_problems(need.device, need.dtype, INTERPRETED)

    def plan(self, part: VerifyPart, *, num_heads: int, kv_lora_rank: int) -> VerifyPart:
        """Choose the splits of a step and reserve their scratch, shared by all layers."""
        device = part.seq_lens.device
        found = describe_device(device)
        rows = part.max_query_len * num_heads
        entry = self.config or find_entry("packed", found.arch, rows, 2, part.page_size)
        tiles = sum(-(-q * num_heads // entry.block_m) for q in part.query_lens)
        steps = -(-part.max_seq_len // entry.block_n)
        slots = found.num_sms * entry.programs_per_sm
        splits = self.num_splits or choose_num_splits(tiles, steps, slots)
        shape = (part.num_rows, num_heads, kv_lora_rank)
        return dataclasses.replace(part, plan=reserve(splits, shape, device))

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
            ArgumentError: shapes, dtypes, strides or a plan that can't be taken; all are listed.
        """
        from specmla.kernels.packed import packed_attention

        found = inputs.mqa_problems(q_latent, q_rope, latent_cache, part)
        require(found or inputs.plan_problems(part.plan, q_latent), "TritonBackend.forward_mqa")
        rows = part.max_query_len * q_latent.shape[1]
        arch = describe_device(q_latent.device).arch
        entry = self.config or find_entry(
            "packed", arch, rows, q_latent.element_size(), part.page_size
        )
        return AttentionOutput(
            *packed_attention(q_latent, q_rope, latent_cache, part, part.plan, entry, softmax_scale)
        )

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
            ArgumentError: shapes, dtypes or strides that can't be taken; all are listed.
        """
        from specmla.kernels.prefill import find_prefill_entry, prefill_attention

        require(inputs.mha_problems(query, key, value, part), "TritonBackend.forward_mha")
        entry = find_prefill_entry(query, value)
        return AttentionOutput(
            *prefill_attention(
                query, key, value, part, entry, softmax_scale=softmax_scale, causal=causal
            )
        )
