"""Prompts by the Triton kernel, for every backend that has no kernel of its own for them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.errors import require
from specmla.kernels import inputs

if TYPE_CHECKING:
    from torch import Tensor

    from specmla.backends.running import RunningSoftmax
    from specmla.metadata import PrefillPart


class TritonPrompts(AttentionBackend):
    """A backend whose prompts go through Triton's MHA kernels."""

    folds_prompts = True

    def unavailable(self) -> list[str]:
        """Report a missing triton package."""
        found = importlib.util.find_spec("triton") is not None
        return [] if found else ["the package triton is not installed"]

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

        require(inputs.mha_problems(query, key, value, part), f"{type(self).__name__}.forward_mha")
        entry = find_prefill_entry(query, value)
        with torch.cuda.device_of(query):
            out, lse = prefill_attention(
                query, key, value, part, entry, softmax_scale=softmax_scale, causal=causal
            )
        return AttentionOutput(out, lse)

    def merge_states(self, held: AttentionOutput, got: AttentionOutput) -> None:
        """Merge by a kernel, in one pass; see `AttentionBackend.merge_states`."""
        from specmla.kernels.merge_states import merge_states_into

        merge_states_into(*held, *got)

    def fold_mha(
        self,
        state: RunningSoftmax,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
    ) -> None:
        """Carry prompt rows on over more keys; see `AttentionBackend.fold_mha`.

        Raises:
            ArgumentError: shapes, dtypes or strides that can't be taken; all are listed.
        """
        from specmla.kernels.fold import fold_keys
        from specmla.kernels.prefill import find_prefill_entry

        require(inputs.mha_problems(query, key, value, part), f"{type(self).__name__}.fold_mha")
        entry = find_prefill_entry(query, value, "fold")
        with torch.cuda.device_of(query):
            fold_keys(state, query, key, value, part, entry, softmax_scale=softmax_scale)
