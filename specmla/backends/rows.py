"""The row-expanded Triton backend: every query row is a single-token decode of its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Capabilities, GraphSupport
from specmla.backends.step_size import StepSize
from specmla.backends.triton_base import TritonKernelsBackend
from specmla.errors import require
from specmla.kernels import inputs
from specmla.kernels.launch import find_entry, gpu_architectures
from specmla.kernels.plan import StepShape
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport

if TYPE_CHECKING:
    from specmla.kernels.launch import LaunchEntry
    from specmla.metadata import VerifyPart


class RowsBackend(TritonKernelsBackend):
    """Attends by the row kernel through the metadata's row tables; reads the cache once a row.

    The form that single-token decode kernels impose on a verify: a fallback and a cross-check.

    The arguments are those of `TritonKernelsBackend`.
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
        architectures=gpu_architectures(),
        graphs=GraphSupport.RAGGED,
        priority=10,
        batch_invariant=True,
        summary="each row a single-token decode: the cache is read once a row",
    )

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Cut every row's keys into pieces on the device; see `TritonBackend.plan`.

        Raises:
            ArgumentError: a part without row tables.
        """
        require(_table_problems(part), "RowsBackend.plan")
        assert part.rows is not None
        size = StepSize.of(part, num_heads, kv_lora_rank, dtype)
        plan = self.make_plan(part.plan, size, None, part.rows.seq_lens)
        return dataclasses.replace(part, plan=plan)

    def step_form(self, size: StepSize) -> tuple[StepShape, LaunchEntry]:
        """Give the step as T decodes of one row each."""
        heads, item = size.num_heads, size.dtype.itemsize
        entry = self.config or find_entry("rows", size.device.arch, heads, item, size.page_size)
        return StepShape(size.num_rows, size.num_rows, heads, size.kv_lora_rank, item), entry

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
        found += _table_problems(part)
        require(found or inputs.plan_problems(part.plan, q_latent), "RowsBackend.forward_mqa")
        assert part.rows is not None
        with torch.cuda.device_of(q_latent):
            out, lse = rows_attention(
                q_latent,
                q_rope,
                latent_cache,
                part.rows,
                part.row_start,
                part.plan,
                softmax_scale,
            )
        return AttentionOutput(out, lse)


def _table_problems(part: VerifyPart) -> list[str]:
    if part.rows is None:
        return ["part.rows is None, accepted are the row tables (`query.decode_rows`)"]
    return []
