"""Fewer drafts in larger batches, where rows are what a step costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence

from specmla.budget.base import BudgetRequest
from specmla.errors import require
from specmla.verify.proposal import RequestResult


class BatchTableBudget:
    """Looks the number of drafts up by the number of requests that are drafted for.

    Args:
        table: drafts by batch size; a batch takes the entry of the smallest size that holds it, the
            last one if none does. {1: 6, 8: 4, 32: 2, 64: 0} drafts 4 for 2 to 8 requests and
            nothing for 33 or more.

    Raises:
        ArgumentError: an empty table, sizes below 1, counts below 0.
    """

    def __init__(self, table: Mapping[int, int]) -> None:
        if not isinstance(table, Mapping):
            require([f"table is {table!r}, accepted is a mapping of sizes to counts"], "table")
        found = [] if table else ["table is empty, accepted is one entry or more"]
        for size, count in table.items():
            if not isinstance(size, int) or not isinstance(count, int) or size < 1 or count < 0:
                found.append(
                    f"table holds {size!r}: {count!r}, accepted are sizes >= 1, counts >= 0"
                )
        require(found, "BatchTableBudget")
        self._sizes = sorted(table)
        self._drafts = [table[size] for size in self._sizes]

    @property
    def max_drafts(self) -> int:
        """Give the largest entry."""
        return max(self._drafts)

    def counts(self, requests: Sequence[BudgetRequest]) -> list[int]:
        """Give every request the entry of the batch."""
        place = min(bisect_left(self._sizes, len(requests)), len(self._sizes) - 1)
        return [self._drafts[place]] * len(requests)

    def observe(self, results: Sequence[RequestResult]) -> None:
        """Do nothing."""

    def reset(self, request_id: Hashable) -> None:
        """Do nothing."""
