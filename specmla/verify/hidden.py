"""The hidden states of a step that a drafter may learn from: those of the committed rows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from specmla.staging import send_arrays
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import HiddenRows, RequestResult


def committed_rows(plan: StepPlan, results: Sequence[RequestResult], states: Tensor) -> HiddenRows:
    """Pick the rows of a committed step whose tokens stay: prompts, old anchors, accepted drafts,
    those of a tree in the order of its path.

    A verify that emitted n tokens leaves n such rows, the anchor's and those of the first n - 1
    tokens; the last one, the new anchor, has no row yet. Rejected rows are left out, and so is what
    follows a stop.

    Args:
        plan: the step.
        results: what `VerifyStep.commit` gave for it.
        states: [T, F] of all its rows.
    """
    starts, counts = [], []
    parts: list[Sequence[int]] = []
    for request, result, row in zip(
        plan.requests, results, plan.metadata.query_start[:-1], strict=True
    ):
        pending = len(request.pending)
        count = pending - 1 + len(result.new_tokens) if not result.is_prompt else pending
        starts.append(request.position + 1 - pending)
        counts.append(count)
        if request.tree is None or result.path is None:
            parts.append(range(row, row + count))
        else:
            place = {node: row + 1 + i for i, node in enumerate(request.tree.nodes)}
            parts.append([row, *(place[node] for node in result.path[: count - 1])])
    # One index: a slice for each request would take longer.
    rows = send_arrays({"rows": array("q", chain.from_iterable(parts))}, states.device)["rows"]
    return HiddenRows(states.index_select(0, rows), tuple(starts), tuple(counts))
