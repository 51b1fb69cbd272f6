"""What the backends over Triton kernels share: where they run, overrides, prompts by MHA."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.errors import require
from specmla.kernels import inputs

if TYPE_CHECKING:
    from specmla.kernels.launch import LaunchEntry
    from specmla.metadata import PrefillPart


class TritonKernelsBackend(AttentionBackend):
    """A backend whose kernels are Triton's.

    Args:
        num_splits: splits of every request instead of the rule (tests, sweeps, fixed results).
        config: launch entry of the decode kernel instead of the table's.

    Raises:
        ArgumentError: fewer than one split.
    """

    def __init__(self, num_splits: int | None = None, config: LaunchEntry | None = None) -> None:
        require(
            [f"num_splits is {num_splits}, accepted are None and values >= 1"]
            if num_splits is not None and num_splits < 1
            else [],
            type(self).__name__,
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
