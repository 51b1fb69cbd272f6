"""The packed Triton backend: ragged verify rows in one launch, every mask, prompts by MHA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Capabilities, GraphSupport, Requirements
from specmla.backends.step_size import StepSize
from specmla.backends.triton_base import TritonKernelsBackend
from specmla.cache.formats.base import byte_problems
from specmla.cache.operations import FP8_FORMATS, fp8_rows
from specmla.errors import require
from specmla.kernels import inputs
from specmla.kernels.launch import describe_device, find_entry, gpu_architectures
from specmla.kernels.plan import StepShape
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport

if TYPE_CHECKING:
    from specmla.kernels.launch import LaunchEntry
    from specmla.metadata import VerifyPart


LARGEST_TILE = 1 << 30
"""Packed rows that only the largest entry of a launch table is meant for."""


class TritonBackend(TritonKernelsBackend):
    """Attends by the packed kernel: a request's rows share tiles, the cache is read once a tile.

    The arguments are those of `TritonKernelsBackend`. A batch-invariant one takes the largest tile
    for every query length.
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
        architectures=gpu_architectures(),
        graphs=GraphSupport.RAGGED,
        priority=20,
        batch_invariant=True,
        formats=FP8_FORMATS,
        fp8_query=("fp8",),
        summary="packed rows of ragged requests, split keys, all masks; the CPU only interprets",
    )

    def problems(self, need: Requirements) -> list[str]:
        """List what is in the way, an architecture without entries for the format included."""
        found, kind = super().problems(need), need.device.type
        is_here = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
        if self.cache_format is None or not is_here or self.unavailable():
            return found
        arch, itemsize = describe_device(need.device).arch, need.dtype.itemsize
        return found + inputs.entry_problems("packed_fp8", arch, itemsize)

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Cut the step into pieces on the device, from its live lengths; shared by all layers.

        Nothing is read back and no size depends on a length, so a captured plan follows the rows,
        requests and lengths of its replay, within T, B and the width of the table. A part that
        has a plan of the same shape gets it again, written anew.
        """
        size = StepSize.of(part, num_heads, kv_lora_rank, dtype)
        plan = self.make_plan(part.plan, size, part.query_start, part.seq_lens)
        return dataclasses.replace(part, plan=plan)

    def step_form(self, size: StepSize) -> tuple[StepShape, LaunchEntry]:
        """Give the packed step, and the entry of its largest request."""
        # Where rows must get the same bits in any company, the largest tile serves every Q.
        rows = LARGEST_TILE if self.batch_invariant else size.max_query_len * size.num_heads
        item = size.dtype.itemsize
        kernel = "packed_fp8" if self.cache_format else "packed"
        entry = self.config or find_entry(kernel, size.device.arch, rows, item, size.page_size)
        return (
            StepShape(size.num_rows, size.num_requests, size.num_heads, size.kv_lora_rank, item),
            entry,
        )

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

        packed, form, found = self.cache_format, self.query_form, []
        if form is not None and packed:
            found = form.problems(q_latent, q_rope)
            q_latent, q_rope = q_latent.to(packed.dtype), q_rope.to(packed.dtype)
            softmax_scale *= form.scale
        row_bytes = packed.bytes_per_row if packed else None
        found += inputs.mqa_problems(q_latent, q_rope, latent_cache, part, row_bytes)
        if packed:
            found += byte_problems(packed, q_latent, q_rope, latent_cache)
        require(found or inputs.plan_problems(part.plan, q_latent), "TritonBackend.forward_mqa")
        with torch.cuda.device_of(q_latent):
            out, lse = packed_attention(
                q_latent,
                q_rope,
                latent_cache,
                part,
                part.plan,
                softmax_scale,
                fp8_rows(packed) if packed else None,
            )
        return AttentionOutput(out, lse)
