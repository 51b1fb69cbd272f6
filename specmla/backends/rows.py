"""The row-expanded Triton backend: every query row is a single-token decode of its own."""

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


class RowsBackend(AttentionBackend):
    """Attends by the row kernel through the metadata's row tables; reads the cache once a row.

    The form that single-token decode kernels impose on a verify: a fallback and a cross-check.

    Args:
        num_splits: splits of every row instead of the rule (tests, sweeps, fixed results).
        config: launch entry of the row kernel instead of the table's.
    """

    capabilities = Capabilities(
        name="rows",
        query_len_support=QueryLenSupport.SINGLE_ONLY,
        masks=frozenset({DraftMask.CAUSAL, DraftMask.FULL}),
        dtypes=inputs.DTYPES,
        device_types=("cuda", "cpu"),
        page_size_multiple=inputs.PAGE_MULTIPLE,
        ranks=inputs.RANKS,
        rope_dims=inputs.ROPE_DIMS,
        min_capability=(8, 0),
        priority=10,
        summary="each row a single-token decode: the cache is read once a row",
    )

    def __init__(self, num_splits: int | None = None, config: LaunchEntry | None = None) -> None:
        require(
            [f"num_splits is {num_splits}, accepted are None and values >= 1"]
            if num_splits is not None and num_splits < 1
            else [],
            "RowsBackend",
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
        entry = self.config or find_entry("rows", found.arch, num_heads, 2, part.page_size)
        programs = -(-num_heads // entry.block_m) * part.num_rows
        steps = -(-part.max_seq_len // entry.block_n)
        slots = found.num_sms * entry.programs_per_sm
        splits = self.num_splits or choose_num_splits(programs, steps, slots)
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
            ArgumentError: shapes, dtypes, strides, a mask or a plan that can't be taken, or a part
                without row tables; all are listed.
        """
        from specmla.kernels.rows import rows_attention

        found = inputs.mqa_problems(q_latent, q_rope, latent_cache, part)
        if part.mask not in self.capabilities.masks or part.tree_bits is not None:
            found.append(f"mask is {part.mask.value!r}, accepted are 'causal' and 'full'")
        if part.rows is None:
            found.append("part.rows is None, accepted are the row tables (`query.decode_rows`)")
        require(found or inputs.plan_problems(part.plan, q_latent), "RowsBackend.forward_mqa")
        assert part.rows is not None
        arch = describe_device(q_latent.device).arch
        entry = self.config or find_entry(
            "rows", arch, q_latent.shape[1], q_latent.element_size(), part.page_size
        )
        return AttentionOutput(
            *rows_attention(
                q_latent,
                q_rope,
                latent_cache,
                part.rows,
                part.row_start,
                part.plan,
                entry,
                softmax_scale,
            )
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

        require(inputs.mha_problems(query, key, value, part), "RowsBackend.forward_mha")
        entry = find_prefill_entry(query, value)
        return AttentionOutput(
            *prefill_attention(
                query, key, value, part, entry, softmax_scale=softmax_scale, causal=causal
            )
        )
