"""Stops drafting place by place, by confidences, before each place is drawn.

A confidence of place j may depend on the drafts before j (a Markov head's does). That is lossless
as long as it is used to decide about place j and later ones, and the decision about an earlier
place is final. So the gate asks first and draws after: `draw` runs the drafter's own draw only
when it has decided, and a request that has stopped never goes on.

Nothing is read back from a GPU: a stopped request's drafts become -1, which ends them for the
acceptance rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from specmla.errors import ArgumentError, count_problems, require
from specmla.staging import send


class StopRule(Protocol):
    """Chooses who goes on at a place."""

    def __call__(
        self, survival: Tensor, alive: Tensor, num_admitted: Tensor, sum_survival: Tensor
    ) -> Tensor:
        """Give [B] bool, who has the place drawn; only those of `alive` count.

        Args:
            survival: [B], the product of a request's confidences up to this place.
            alive: [B] bool, who has not stopped.
            num_admitted: [], drafts admitted at earlier places, of all requests.
            sum_survival: [], the sum of their survivals.
        """
        ...


class Gate:
    """One step's decisions, from the first place on.

    Args:
        rule: chooses who goes on.
        num_requests: B.
        device: of the confidences.
    """

    def __init__(self, rule: StopRule, num_requests: int, device: torch.device | str) -> None:
        found = count_problems({"num_requests": num_requests}, 0)
        if not callable(rule):
            found.append(f"rule is {rule!r}, accepted is a StopRule, which can be called")
        require(found, "Gate")
        self._rule = rule
        self._survival = torch.ones(num_requests, dtype=torch.float64, device=device)
        self._alive = torch.ones(num_requests, dtype=torch.bool, device=device)
        self._admitted = torch.zeros((), dtype=torch.int64, device=device)
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def draw(self, confidence: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        """Decide about the next place, then draw it.

        Args:
            confidence: [B] floating, the estimated chance that the draft of this place is accepted
                if those before it were. NaN stops a request.
            draw: gives the drafts [B] int64 of this place; called once, after the decision.

        Returns:
            [B] int64, the drafts, -1 where a request has stopped.

        Raises:
            ArgumentError: confidences of another shape.
        """
        if confidence.shape != self._alive.shape:
            raise ArgumentError(
                f"confidence has shape {tuple(confidence.shape)}, accepted is "
                f"{tuple(self._alive.shape)}"
            )
        self._survival = self._survival * confidence.double().clamp(0.0, 1.0)
        self._alive = self._alive & ~torch.isnan(self._survival)
        goes_on = self._rule(self._survival, self._alive, self._admitted, self._sum)
        self._alive = self._alive & goes_on
        self._admitted = self._admitted + self._alive.sum()
        self._sum = self._sum + self._survival.where(self._alive, 0.0).sum()
        return torch.where(self._alive, draw(), -1)


class SurvivalThreshold:
    """Goes on while the product of a request's confidences is `least` or more."""

    def __init__(self, least: float) -> None:
        good = isinstance(least, Real) and 0 <= least <= 1
        require([] if good else [f"least is {least!r}, accepted are 0 to 1"], "SurvivalThreshold")
        self.least = least

    def __call__(
        self, survival: Tensor, alive: Tensor, num_admitted: Tensor, sum_survival: Tensor
    ) -> Tensor:
        """Compare each request by itself."""
        return survival >= self.least


class ThroughputStop:
    """Goes on while it raises the expected tokens per second of the whole batch.

    Requests are added at each place by falling survival, as long as
    (B + sum of survivals) * steps_per_s[rows] rises; the first fall ends the place, and those that
    were not added have stopped. This is DSpark's scheduler with early stop (arXiv:2607.05147,
    algorithm 1), place after place: unlike a search over all places it uses no confidence that
    depends on a draft which it still may drop.

    Args:
        steps_per_s: measured steps per second for 0, 1, 2 ... rows of a verify; more rows than it
            has entries are never admitted.

    Raises:
        ArgumentError: an empty table or rates that are not positive.
    """

    def __init__(self, steps_per_s: Sequence[float]) -> None:
        if not isinstance(steps_per_s, Sequence) or isinstance(steps_per_s, str | bytes):
            what = f"steps_per_s is {steps_per_s!r}, accepted is a sequence of finite rates above 0"
            require([what], "ThroughputStop")
        good = [isinstance(rate, Real) and 0 < rate < float("inf") for rate in steps_per_s]
        bad = [rate for rate, is_good in zip(steps_per_s, good, strict=True) if not is_good]
        found = [f"steps_per_s holds {bad[:4]}, accepted are finite rates above 0"] if bad else []
        if not steps_per_s:
            found.append("steps_per_s is empty, accepted is one rate or more")
        require(found, "ThroughputStop")
        self._rates = torch.tensor([float(rate) for rate in steps_per_s], dtype=torch.float64)

    def __call__(
        self, survival: Tensor, alive: Tensor, num_admitted: Tensor, sum_survival: Tensor
    ) -> Tensor:
        """Add requests one by one."""
        if self._rates.device != survival.device:
            self._rates = send(self._rates, survival.device)
        b, last = len(survival), len(self._rates) - 1
        ranked, order = survival.where(alive, -1.0).sort(descending=True, stable=True)
        added = torch.arange(b + 1, device=survival.device)
        rows = b + num_admitted + added
        gain = torch.nn.functional.pad(ranked.clamp(min=0.0).cumsum(0), (1, 0))
        rate = self._rates[rows.clamp(max=last)].where(rows <= last, 0.0)
        speed = (b + sum_survival + gain) * rate
        rises = ((speed[1:] > speed[:-1]) & (ranked >= 0)).long().cumprod(0).bool()
        return torch.zeros_like(alive).scatter(0, order, rises)
