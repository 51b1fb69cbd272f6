"""Prompts by the Triton kernel, for every backend that has no kernel of its own for them."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING

import torch

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.errors import require
from specmla.kernels import inputs

if TYPE_CHECKING:
    from torch import Tensor

    from specmla.backends.running import RunningSoftmax
    from specmla.metadata import PrefillPart
    from specmla.prompt_keys import PromptKeys


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
        from specmla.kernels.head_widths import find_prefill_entry
        from specmla.kernels.prefill import prefill_attention
        from specmla.prompt_keys import PromptKeys

        require(inputs.mha_problems(query, key, value, part), f"{type(self).__name__}.forward_mha")
        entry, keys = find_prefill_entry(query, value), PromptKeys(key, None, value)
        with torch.cuda.device_of(query):
            out, lse = prefill_attention(
                query, keys, part, entry, softmax_scale=softmax_scale, causal=causal
            )
        return AttentionOutput(out, lse)

    def attend_keys(
        self,
        query: Tensor,
        keys: PromptKeys,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool = True,
        held: AttentionOutput | None = None,
        in_place: bool = False,
    ) -> AttentionOutput:
        """Attend over keys where they lie and merge before the result is written, in one kernel.

        See `AttentionBackend.attend_keys`.

        Raises:
            ArgumentError: shapes, dtypes or strides that can't be taken; all are listed.
        """
        from specmla.kernels.head_widths import attendable, find_prefill_entry
        from specmla.kernels.prefill import prefill_attention

        found = inputs.mha_problems(query, keys.key, keys.value, part, keys.rope)
        found += inputs.held_problems(query, keys.value, held, in_place)
        require(found, f"{type(self).__name__}.attend_keys")
        entry = find_prefill_entry(query, keys.value)
        run = partial(prefill_attention, softmax_scale=softmax_scale, causal=causal, held=held)
        with torch.cuda.device_of(query):
            out, lse = run(query, attendable(keys), part, entry, into=held if in_place else None)
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
        from specmla.kernels.head_widths import find_prefill_entry

        require(inputs.mha_problems(query, key, value, part), f"{type(self).__name__}.fold_mha")
        entry = find_prefill_entry(query, value, "fold")
        with torch.cuda.device_of(query):
            fold_keys(state, query, key, value, part, entry, softmax_scale=softmax_scale)
