"""Tell the constraints of a step what its requests emit, before anything else moves on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specmla.errors import ConstraintError
from specmla.verify.judge import Decision
from specmla.verify.plan import PlannedRequest


def advance_constraints(requests: Sequence[PlannedRequest], decided: Sequence[Decision]) -> None:
    """Advance each request's constraint by what its decision emits; requests stay as they are.

    Args:
        requests: of the step.
        decided: for each of them.

    Raises:
        ConstraintError: a constraint raised; those of later requests have heard nothing.
    """
    told: list[Hashable] = []
    for request, decision in zip(requests, decided, strict=True):
        if request.state.constraint is None:
            continue
        emitted, _ = request.state.cut(decision.tokens)
        try:
            request.state.constraint.advance(emitted)
        except Exception as error:
            raise ConstraintError(request.request_id, told, error) from error
        told.append(request.request_id)
