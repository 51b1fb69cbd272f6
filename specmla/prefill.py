"""Prompt rows of one layer by MHA: over all keys at once, or over cached context chunk by chunk.

Attention over two disjoint sets of keys is merged by their LSE (`AttentionBackend.merge_states`):

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

so the new rows attend to each other causally and to each chunk of the context in full, and no more
than one chunk is up-projected at a time: what it takes does not grow with the context. For
batch-invariant results one running softmax is carried over the chunks instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.running import RunningSoftmax
from specmla.metadata import ContextPart, PrefillPart
from specmla.workspace import PrefillWorkspace


@dataclass(frozen=True)
class PromptAttention:
    """Attends the prompt rows of one layer.

    Attributes:
        backend: attends.
        softmax_scale: as in `AttentionBackend.forward_mha`.
        gather: reads the layer's cached rows at slots [n] into [n, A], into new memory for None.
        expand: up-projects rows [n, A] to keys [n, H, P + R] and values [n, H, V].
        row_scale: what gathered numbers are multiplied by: not one by one, but in the scores and in
            what is attended.
    """

    backend: AttentionBackend
    softmax_scale: float
    gather: Callable[[Tensor, Tensor | None], Tensor]
    expand: Callable[[Tensor], tuple[Tensor, Tensor]]
    row_scale: float = 1.0

    def attend(self, query: Tensor, part: PrefillPart) -> AttentionOutput:
        """Attend query rows to what `part` says they see; the new rows are in the cache already.

        New rows are read back from it, so that a row sees what every later one will (a quantised
        cache does not hold quite what was stored).

        Args:
            query: [T, H, P + R], any strides with the last one 1.
            part: the prompt part of the step.

        Returns:
            Values [T, H, V] in the dtype of the query, and their LSE.
        """
        if part.folded:
            return self._folded(query, part)
        state = self._over(query, part, part.workspace, causal=True)
        if not part.context:
            return state if self.row_scale == 1.0 else self._scaled(state)
        # Rounded to the query's dtype once, after the last merge.
        wide = torch.promote_types(query.dtype, torch.float32)
        merged = AttentionOutput(state.out.to(wide), state.lse)
        for chunk in part.context:
            self._add_chunk(merged, query, chunk, part.workspace)
        out = merged.out if self.row_scale == 1.0 else merged.out.mul_(self.row_scale)
        return AttentionOutput(out.to(query.dtype), merged.lse)

    def _folded(self, query: Tensor, part: PrefillPart) -> AttentionOutput:
        """Carry one softmax over all chunks: how they are cut changes no bit."""
        scale = self.softmax_scale * self.row_scale
        state: RunningSoftmax | None = None
        for chunk in part.context:
            key, value = self._expanded(chunk.keys, part.workspace)
            if state is None:
                state = RunningSoftmax.start(query, value.shape[2])
            rows = slice(chunk.first_row, chunk.end_row)
            seen = RunningSoftmax(*(held[rows] for held in state))
            self.backend.fold_mha(seen, query[rows], key, value, chunk.keys, softmax_scale=scale)
        assert state is not None  # a prompt has a row, and so a key
        return AttentionOutput(*state.finish(query.dtype, self.row_scale))

    def _scaled(self, state: AttentionOutput) -> AttentionOutput:
        return AttentionOutput(state.out * self.row_scale, state.lse)

    def _add_chunk(
        self,
        merged: AttentionOutput,
        query: Tensor,
        chunk: ContextPart,
        workspace: PrefillWorkspace | None,
    ) -> None:
        """Merge one chunk of context into the rows that see it, in place."""
        rows = slice(chunk.first_row, chunk.end_row)
        got = self._over(query[rows], chunk.keys, workspace, causal=False)
        self.backend.merge_states(AttentionOutput(merged.out[rows], merged.lse[rows]), got)

    def _over(
        self,
        query: Tensor,
        part: PrefillPart,
        workspace: PrefillWorkspace | None,
        *,
        causal: bool,
    ) -> AttentionOutput:
        """Gather the keys of a part, up-project them and attend to them."""
        key, value = self._expanded(part, workspace)
        scale = self.softmax_scale * self.row_scale
        return self.backend.forward_mha(query, key, value, part, softmax_scale=scale, causal=causal)

    def _expanded(
        self, part: PrefillPart, workspace: PrefillWorkspace | None
    ) -> tuple[Tensor, Tensor]:
        """Gather the keys of a part and up-project them.

        New rows may be more than a workspace has; their memory is the step's, not the context's.
        """
        slots = part.kv_slots
        count = slots.shape[0]
        memory = None
        if workspace is not None and count <= workspace.num_rows:
            memory = workspace.rows(count)
        return self.expand(self.gather(slots, memory))
