"""The hidden states of a step that a drafter may learn from: those of the committed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.verify.plan import StepPlan
from specmla.verify.proposal import HiddenRows, RequestResult


def committed_rows(plan: StepPlan, results: Sequence[RequestResult], states: Tensor) -> HiddenRows:
    """Pick the rows of a committed step whose tokens stay: prompts, old anchors, accepted drafts.

    A verify that emitted n tokens leaves n such rows, the anchor's and those of the first n - 1
    tokens; the last one, the new anchor, has no row yet. Rejected rows are left out, and so is what
    follows a stop.

    Args:
        plan: the step, a chain a request.
        results: what `VerifyStep.commit` gave for it.
        states: [T, F] of all its rows.
    """
    starts, counts, parts = [], [], []
    for request, result, row in zip(
        plan.requests, results, plan.metadata.query_start[:-1], strict=True
    ):
        pending = len(request.pending)
        count = pending - 1 + len(result.new_tokens) if not result.is_prompt else pending
        starts.append(request.position + 1 - pending)
        counts.append(count)
        parts.append(states[row : row + count])
    return HiddenRows(torch.cat(parts), tuple(starts), tuple(counts))
