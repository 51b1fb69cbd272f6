"""As many drafts as the acceptance of a request's earlier drafts pays for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Integral, Real

from specmla.budget.base import BudgetRequest
from specmla.errors import require
from specmla.verify.proposal import RequestResult


class HistoryBudget:
    """Drafts what maximises the expected tokens for the time of a step.

    If each draft is accepted with probability a, K drafts yield (1 - a**(K+1)) / (1 - a) tokens
    (Leviathan et al., ICML 2023, equation 1) in the time 1 + draft_cost * K, counted in steps
    without drafts. a is estimated for each request by itself, from tests of drafts: those
    accepted, and the one refused. Older steps count less by `decay` each.

    Args:
        max_drafts: most drafts.
        draft_cost: time that one more draft takes, its row in the verify included, in steps without
            drafts.
        min_drafts: fewest drafts. With 0 a request whose drafts failed is never tried again.
        decay: weight of a step relative to the one after it, in 0 .. 1.
        prior: acceptance assumed at first, with the weight of two drafts.

    Raises:
        ArgumentError: arguments outside their ranges.
    """

    def __init__(
        self,
        max_drafts: int,
        *,
        draft_cost: float = 0.1,
        min_drafts: int = 1,
        decay: float = 0.9,
        prior: float = 0.7,
    ) -> None:
        found = []
        if not isinstance(max_drafts, Integral) or max_drafts < 0:
            found.append(f"max_drafts is {max_drafts!r}, accepted are integers of 0 or more")
        elif not isinstance(min_drafts, Integral) or not 0 <= min_drafts <= max_drafts:
            found.append(
                f"min_drafts is {min_drafts!r}, accepted are integers of 0 to "
                f"max_drafts={max_drafts}"
            )
        if not isinstance(draft_cost, Real) or not 0 <= draft_cost < float("inf"):
            found.append(f"draft_cost is {draft_cost!r}, accepted are finite values of 0 or more")
        for name, value in (("decay", decay), ("prior", prior)):
            if not isinstance(value, Real) or not 0 <= value <= 1:
                found.append(f"{name} is {value!r}, accepted are 0 to 1")
        require(found, "HistoryBudget")
        self.max_drafts, self.min_drafts = max_drafts, min_drafts
        self.draft_cost, self.decay = draft_cost, decay
        self._start = (2 * prior, 2.0)
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def acceptance(self, request_id: Hashable) -> float:
        """Estimate the chance that a draft of the request is accepted."""
        accepted, tested = self._seen.get(request_id, self._start)
        return accepted / tested if tested else 0.0

    def counts(self, requests: Sequence[BudgetRequest]) -> list[int]:
        """Give each request the count that pays best."""
        return [self._best(self.acceptance(r.request_id)) for r in requests]

    def observe(self, results: Sequence[RequestResult]) -> None:
        """Count the tests of a step; drafts behind a refused one were not tested."""
        for r in results:
            if r.is_prompt or not r.num_drafts:
                continue
            accepted, tested = self._seen.get(r.request_id, self._start)
            now = r.num_accepted + (r.num_accepted < r.num_drafts)
            keep = self.decay
            self._seen[r.request_id] = (keep * accepted + r.num_accepted, keep * tested + now)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request."""
        self._seen.pop(request_id, None)

    def _best(self, a: float) -> int:
        best, best_rate, tokens = self.min_drafts, 0.0, 0.0
        for count in range(self.max_drafts + 1):
            tokens += a**count
            rate = tokens / (1 + self.draft_cost * count)
            if count >= self.min_drafts and rate > best_rate:
                best, best_rate = count, rate
        return best
