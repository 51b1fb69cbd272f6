"""How many tokens to draft for each request, chosen before any of them is drawn.

Acceptance is lossless only if whether a draft is verified does not depend on that draft. A budget
that looks at the drafted tokens, or at confidences that were computed from them, biases the output:
with p = (0.7, 0.3) and q = (0.5, 0.5), verifying a draft where it is the first token and dropping
it where it is the second gives the first one with 0.85. So a `Budget` is asked before the drafter
runs and is told of committed tokens only, and a `Gate` decides about a place before it lets that
place be drawn.

A number of drafts that follows from the batch (`BatchTableBudget`, `ThroughputStop`) leaves the
distribution of a request's tokens as it is. The tokens of a seed depend on batch mates then, but
for greedy requests and sample-match: where that matters, take `FixedBudget` or `HistoryBudget`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import NamedTuple, Protocol, runtime_checkable

from specmla.errors import ArgumentError
from specmla.verify.proposal import RequestResult


class BudgetRequest(NamedTuple):
    """A request that may be drafted for.

    Attributes:
        request_id: the engine's name of it.
        num_tokens: committed tokens.
        limit: most drafts worth verifying, of `max_tokens` and the context.
    """

    request_id: Hashable
    num_tokens: int
    limit: int


@runtime_checkable
class Budget(Protocol):
    """Chooses K of each request from what was committed before this step."""

    @property
    def max_drafts(self) -> int:
        """Most drafts of any request in any step."""
        ...

    def counts(self, requests: Sequence[BudgetRequest]) -> list[int]:
        """Give the drafts of each request of the coming step, 0 or more, in order."""
        ...

    def observe(self, results: Sequence[RequestResult]) -> None:
        """Learn what the last step accepted."""
        ...

    def reset(self, request_id: Hashable) -> None:
        """Forget a request that has ended; unknown names are ignored."""
        ...


def chosen_counts(budget: Budget, requests: Sequence[BudgetRequest]) -> list[int]:
    """Ask a budget for the drafts of a step and check what it says.

    Raises:
        ArgumentError: counts that are not one integer of 0 or more for each request.
    """
    given = budget.counts(requests)
    try:
        counts = list(given)
        good = len(counts) == len(requests) and all(
            isinstance(n, Integral) and n >= 0 for n in counts
        )
    except TypeError:
        good = False
    if not good:
        raise ArgumentError(
            f"counts of {type(budget).__name__} are {given!r} for {len(requests)} requests, "
            "accepted is one integer of 0 or more for each"
        )
    return [int(n) for n in counts]
