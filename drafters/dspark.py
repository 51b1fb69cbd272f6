"""DSpark: a block as DFlash's, then a small sequential head and an estimate of acceptance.

Draft j is drawn from U_j + W_2 W_1[x_{j-1}], so each reported row is the conditional one that it
was drawn from. With `min_confidence` a request's drafts end before the first position at which the
product of the confidences so far falls below it. The confidence of position j looks at x_{j-1} and
earlier, never at x_j: what is drafted is decided before it is drawn, so no output is biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from drafters.block import BlockDrafter, BlockOutput
from drafters.block_model import pair_problems
from specmla import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block_graphs import BlockInputs
    from drafters.block_model import BlockDraftModel
    from drafters.sheet import DraftSheet, Wanted
    from specmla import CapturedSheet, DeepseekForCausalLM, DrawnDrafts


class DSparkDrafter(BlockDrafter):
    """Draws a block position by position through the Markov head, see `BlockDrafter`.

    Args:
        min_confidence: least product of confidences at which a position is still drafted, 0 for
            no early stop. The tokens after a stop are -1, which ends a request's drafts.

    Attributes:
        confidences: [B, K] of the last proposal's rows, or None without such a head.
    """

    def __init__(
        self,
        model: DeepseekForCausalLM,
        draft: BlockDraftModel,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        if found := pair_problems(model, draft):
            raise ArgumentError(f"{type(self).__name__}: " + "; ".join(found))
        if not draft.has_markov:
            found.append("draft has no Markov head, accepted is markov_rank >= 1")
        if not 0 <= min_confidence < 1:
            found.append(f"min_confidence is {min_confidence!r}, accepted is 0 to below 1")
        if min_confidence and not draft.config.confidence_head:
            found.append(f"min_confidence is {min_confidence!r}, but draft has no confidence head")
        if found:
            raise ArgumentError("DSparkDrafter: " + "; ".join(found))
        super().__init__(model, draft, num_pages=num_pages, page_size=page_size, backend=backend)
        self.min_confidence = min_confidence
        self.confidences: Tensor | None = None

    def fill(self, sheet: DraftSheet | CapturedSheet, output: BlockOutput) -> None:
        """Choose the drafts one after the other."""
        draft, previous, reached = self.draft, output.anchor_tokens, None
        found: list[Tensor] = []
        for column in range(sheet.width):
            live = sheet.live(column)
            state = draft.markov_state(previous[:live])
            logits = output.logits[:live, column] + draft.markov_logits(state)
            if draft.config.confidence_head:
                confidence = draft.confidence_logit(output.hidden[:live, column], state).sigmoid()
                found.append(torch.nn.functional.pad(confidence, (0, len(sheet.tokens) - live)))
                reached = confidence if reached is None else reached[:live] * confidence
            previous = sheet.fill(column, logits)
            if self.min_confidence and reached is not None:
                sheet.tokens[:live, column].masked_fill_(reached < self.min_confidence, -1)
        self.confidences = torch.stack(found, dim=1) if found else None

    def _draw(self, given: BlockInputs, sheet: CapturedSheet) -> Any:
        super()._draw(given, sheet)
        return self.confidences

    def _replay(self, wanted: Sequence[Wanted]) -> DrawnDrafts | None:
        drawn = super()._replay(wanted)
        if drawn is not None and drawn.besides is not None:
            self.confidences = drawn.besides[: len(wanted), : wanted[0].drafts].clone()
        return drawn
