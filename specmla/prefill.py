"""Prompt rows of one layer by MHA: over all keys at once, or over cached context chunk by chunk.

Attention over two disjoint sets of keys is merged by their LSE (`AttentionBackend.attend_keys`):

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

so the new rows attend to each chunk of the context in full and last to each other causally (and to
the last chunk, if it and they fit into the workspace), and no more than one chunk is up-projected
at a time: what it takes does not grow with the context. For batch-invariant results one running
softmax is carried over the chunks instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.running import RunningSoftmax
from specmla.metadata import ContextPart, PrefillPart
from specmla.prompt_keys import PromptKeys
from specmla.workspace import PrefillWorkspace


@dataclass(frozen=True)
class PromptAttention:
    """Attends the prompt rows of one layer.

    Attributes:
        backend: attends.
        softmax_scale: as in `AttentionBackend.forward_mha`.
        gather: reads the layer's cached rows at slots [n] into [n, A], into new memory for None.
        expand: up-projects rows [n, A]; the keys may be views of them.
        row_scale: what gathered numbers are multiplied by: not one by one, but in the scores and in
            what is attended.
    """

    backend: AttentionBackend
    softmax_scale: float
    gather: Callable[[Tensor, Tensor | None], Tensor]
    expand: Callable[[Tensor], PromptKeys]
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
        held: AttentionOutput | None = None
        for chunk in part.context:
            held = self._with_chunk(held, query, chunk, part.workspace)
        keys = self._expanded(part, part.workspace)
        scale = self.softmax_scale * self.row_scale
        # Rounded to the query's dtype once: with the last merge, or after it where it is scaled.
        in_place = held is not None and self.row_scale != 1.0
        state = self.backend.attend_keys(
            query, keys, part, softmax_scale=scale, causal=True, held=held, in_place=in_place
        )
        if self.row_scale == 1.0:
            return state
        return AttentionOutput((state.out * self.row_scale).to(query.dtype), state.lse)

    def _folded(self, query: Tensor, part: PrefillPart) -> AttentionOutput:
        """Carry one softmax over all chunks: how they are cut changes no bit."""
        scale = self.softmax_scale * self.row_scale
        state: RunningSoftmax | None = None
        for chunk in part.context:
            keys = self._expanded(chunk.keys, part.workspace)
            key, value = keys.joined(), keys.value
            if state is None:
                state = RunningSoftmax.start(query, value.shape[2])
            rows = slice(chunk.first_row, chunk.end_row)
            seen = RunningSoftmax(*(held[rows] for held in state))
            self.backend.fold_mha(seen, query[rows], key, value, chunk.keys, softmax_scale=scale)
        assert state is not None  # a prompt has a row, and so a key
        return AttentionOutput(*state.finish(query.dtype, self.row_scale))

    def _with_chunk(
        self,
        held: AttentionOutput | None,
        query: Tensor,
        chunk: ContextPart,
        workspace: PrefillWorkspace | None,
    ) -> AttentionOutput:
        """Merge one chunk of context into the rows that see it, in place; None: none seen yet."""
        keys = self._expanded(chunk.keys, workspace)
        if held is None:
            held = _empty_state(query, keys.value.shape[2])
        rows = slice(chunk.first_row, chunk.end_row)
        self.backend.attend_keys(
            query[rows],
            keys,
            chunk.keys,
            softmax_scale=self.softmax_scale * self.row_scale,
            causal=False,
            held=AttentionOutput(held.out[rows], held.lse[rows]),
            in_place=True,
        )
        return held

    def _expanded(self, part: PrefillPart, workspace: PrefillWorkspace | None) -> PromptKeys:
        """Gather the keys of a part and up-project them.

        New rows may be more than a workspace has; their memory is the step's, not the context's.
        """
        slots = part.kv_slots
        count = slots.shape[0]
        memory = None
        if workspace is not None and count <= workspace.num_rows:
            memory = workspace.rows(count)
        return self.expand(self.gather(slots, memory))


def _empty_state(query: Tensor, value_width: int) -> AttentionOutput:
    """Make the state of rows that have seen nothing; its values are undefined, and not read."""
    rows, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((rows, heads), -torch.inf, dtype=torch.float32)
    return AttentionOutput(query.new_empty(rows, heads, value_width, dtype=wide), lse)
