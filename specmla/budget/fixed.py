"""The same number of drafts in every step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from specmla.budget.base import BudgetRequest
from specmla.errors import require
from specmla.verify.proposal import RequestResult


@dataclass(frozen=True)
class FixedBudget:
    """Drafts `num_drafts` for every request, or by request (absent: 0)."""

    num_drafts: int | Mapping[Hashable, int]

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ArgumentError: a count that is no integer of 0 or more.
        """
        given = (
            self.num_drafts.values() if isinstance(self.num_drafts, Mapping) else [self.num_drafts]
        )
        bad = [n for n in given if not isinstance(n, Integral) or n < 0]
        found = f"num_drafts holds {bad}, accepted are integers of 0 or more"
        require([found] if bad else [], "FixedBudget")

    @property
    def max_drafts(self) -> int:
        """Give the largest count."""
        if isinstance(self.num_drafts, Mapping):
            return max(self.num_drafts.values(), default=0)
        return self.num_drafts

    def counts(self, requests: Sequence[BudgetRequest]) -> list[int]:
        """Give each request its count."""
        if isinstance(self.num_drafts, Mapping):
            return [self.num_drafts.get(r.request_id, 0) for r in requests]
        return [self.num_drafts] * len(requests)

    def observe(self, results: Sequence[RequestResult]) -> None:
        """Do nothing."""

    def reset(self, request_id: Hashable) -> None:
        """Do nothing."""
