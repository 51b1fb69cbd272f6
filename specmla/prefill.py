"""Prompt rows of one layer by MHA: over all keys at once, or over cached context chunk by chunk.

Attention over two disjoint sets of keys is merged by their LSE (`merge_attention_states`):

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

so the new rows attend to each other causally and to each chunk of the context in full, and no more
than one chunk is up-projected at a time: what it takes does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.metadata import ContextPart, PrefillPart
from specmla.reference import merge_attention_states
from specmla.workspace import PrefillWorkspace

Latents = tuple[Tensor, Tensor]
"""kv_latent [n, C] and k_rope [n, R] of the same tokens."""


@dataclass(frozen=True)
class PromptAttention:
    """Attends the prompt rows of one layer.

    Attributes:
        backend: attends.
        softmax_scale: as in `AttentionBackend.forward_mha`.
        gather: reads the layer's cached rows at slots [n] into [n, A], into new memory for None.
        expand: up-projects `Latents` to keys [n, H, P + R] and values [n, H, V].
    """

    backend: AttentionBackend
    softmax_scale: float
    gather: Callable[[Tensor, Tensor | None], Tensor]
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def attend(self, query: Tensor, new: Latents, part: PrefillPart) -> AttentionOutput:
        """Attend query rows [T, H, P + R] to what `part` says they see.

        Args:
            query: [T, H, P + R], any strides with the last one 1.
            new: of the T new rows, stored in the cache already.
            part: the prompt part of the step.

        Returns:
            Values [T, H, V] in the dtype of the query, and their LSE.
        """
        if part.kv_slots is not None:
            return self._over_cached(query, new, part, part.workspace, causal=True)
        key, value = self.expand(*new)
        state = self.backend.forward_mha(query, key, value, part, softmax_scale=self.softmax_scale)
        del key, value  # not held beside those of a chunk
        if not part.context:
            return state
        # Rounded to the query's dtype once, after the last merge.
        wide = torch.promote_types(query.dtype, torch.float32)
        merged = AttentionOutput(state.out.to(wide), state.lse)
        for chunk in part.context:
            self._add_chunk(merged, query, new, chunk, part.workspace)
        return AttentionOutput(merged.out.to(query.dtype), merged.lse)

    def _add_chunk(
        self,
        merged: AttentionOutput,
        query: Tensor,
        new: Latents,
        chunk: ContextPart,
        workspace: PrefillWorkspace | None,
    ) -> None:
        """Merge one chunk of context into the rows that see it, in place."""
        rows = slice(chunk.first_row, chunk.end_row)
        got = self._over_cached(query[rows], new, chunk.keys, workspace, causal=False)
        out, lse = merged.out[rows], merged.lse[rows]
        both = merge_attention_states(out, lse, *got)
        out.copy_(both.out)
        lse.copy_(both.lse)

    def _over_cached(
        self,
        query: Tensor,
        new: Latents,
        part: PrefillPart,
        workspace: PrefillWorkspace | None,
        *,
        causal: bool,
    ) -> AttentionOutput:
        """Gather the keys of a part, up-project them and attend to them."""
        slots = part.kv_slots
        assert slots is not None
        rows = self.gather(slots, None if workspace is None else workspace.rows(slots.shape[0]))
        key, value = self.expand(*rows.split([x.shape[-1] for x in new], dim=-1))
        return self.backend.forward_mha(
            query, key, value, part, softmax_scale=self.softmax_scale, causal=causal
        )
