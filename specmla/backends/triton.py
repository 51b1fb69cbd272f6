"""The packed Triton backend: ragged verify rows in one launch, every mask, prompts by MHA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Capabilities
from specmla.backends.triton_base import TritonKernelsBackend
from specmla.errors import require
from specmla.kernels import inputs
from specmla.kernels.launch import (
    choose_num_splits,
    describe_device,
    find_entry,
    reserve,
)
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport

if TYPE_CHECKING:
    from specmla.metadata import VerifyPart


class TritonBackend(TritonKernelsBackend):
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

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Choose the splits of a step and reserve their scratch, shared by all layers."""
        device = part.seq_lens.device
        found = describe_device(device)
        rows = part.max_query_len * num_heads
        entry = self.config or find_entry(
            "packed", found.arch, rows, dtype.itemsize, part.page_size
        )
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
        with torch.cuda.device_of(q_latent):
            out, lse = packed_attention(
                q_latent, q_rope, latent_cache, part, part.plan, entry, softmax_scale
            )
        return AttentionOutput(out, lse)
