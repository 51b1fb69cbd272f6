"""Steps that were planned and not yet committed, and the pages that they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from specmla.query import QueryLenSupport
from specmla.verify.judge import Verdict
from specmla.verify.plan import StepPlan
from specmla.verify.requests import RequestState
from specmla.verify.step import VerifyStep


@dataclass(eq=False)
class Flight:
    """A step from its plan to its commit.

    Attributes:
        plan: the step.
        places: by request, its row in the step's verdict.
        ends: by request, the end of the cache rows that the step may write.
        verdict: what was decided, once it is on its way.
    """

    plan: StepPlan
    places: dict[RequestState, int]
    ends: dict[RequestState, int]
    verdict: Verdict | None = None

    @classmethod
    def of(cls, plan: StepPlan, ends: Sequence[int]) -> Flight:
        """Make one of a step just planned, whose requests have these ends."""
        states = [r.state for r in plan.requests]
        return cls(plan, {s: i for i, s in enumerate(states)}, dict(zip(states, ends, strict=True)))

    def bound(self, state: RequestState) -> int | None:
        """Give the drafts that the step verifies of a request, None if it has no part in it."""
        place = self.places.get(state)
        return None if place is None else self.plan.requests[place].num_drafts


class Flights:
    """The steps of one `VerifyStep` that are under way, oldest first, and the planned one.

    Attributes:
        flying: verified ones, at most two.
        open: planned, not verified.
    """

    def __init__(self, step: VerifyStep) -> None:
        self.step = step
        self.flying: list[Flight] = []
        self.open: Flight | None = None
        self._guard: StepPlan | None = None

    @property
    def last(self) -> Flight | None:
        """The step under way that the next one continues."""
        return self.flying[-1] if self.flying else None

    @property
    def held(self) -> list[Flight]:
        """All steps, the planned one last."""
        return [*self.flying, *([self.open] if self.open else [])]

    @property
    def problems(self) -> list[str]:
        """List why no step can be planned now."""
        found = []
        if self.is_foreign:
            found.append("the step planned last was planned elsewhere: commit or cancel it there")
        if self.open is not None:
            found.append("the last planned step was neither verified nor cancelled")
        if len(self.flying) > 1:
            found.append("two steps are under way, accepted is one: commit the older one")
        return found

    @property
    def is_foreign(self) -> bool:
        """Tell whether the step that is open was planned elsewhere; there are none here then."""
        return self.step._open is not self._guard

    def is_live(self, state: RequestState) -> bool:
        """Tell whether a request is still active, and not another one of its name."""
        table, name = self.step._table, state.request_id
        return name in table and table[name] is state

    def rows_ahead(self, state: RequestState) -> int:
        """Count the rows that the steps held, once the older one is committed, may still write."""
        bound = self.held[-1].bound(state) if self.held else None
        return 0 if bound is None else 1 + bound

    def settle_ends(self, states: Iterable[RequestState]) -> None:
        """Bring down the ends of requests whose lengths are known now."""
        for state in filter(self.is_live, states if self.held else ()):
            if state in self.held[-1].ends:
                end = self.step.blocks.length(state.request_id) + self.rows_ahead(state)
                self.held[-1].ends[state] = min(end, self.held[-1].ends[state])

    def put(self, flight: Flight) -> None:
        """Take a planned step in."""
        self.open = flight
        self.guard()

    def take_off(self, verdict: Verdict) -> None:
        """The planned step is under way."""
        assert self.open is not None
        self.open.verdict = verdict
        self.flying.append(self.open)
        self.open = None

    def cancel(self) -> None:
        """Forget the planned step and give back what it reserved."""
        assert self.open is not None
        states, self.open = list(self.open.places), None
        self.release(states)
        self.guard()

    def cancel_all(self) -> None:
        """Forget every step; lengths stay as they are."""
        states = {state for flight in self.held for state in flight.places}
        self.flying, self.open = [], None
        self.release(states)
        self.guard()

    def remove(self, request_id: Hashable) -> None:
        """Drop a request, whatever is under way of it."""
        if self.is_foreign:
            self.step.remove(request_id)
            return
        self.step._table[request_id]
        self.step.blocks.free(request_id)
        del self.step._table[request_id]
        self.guard()

    def drop(self, request_ids: Iterable[Hashable]) -> None:
        """Forget those requests that are active, and steps that hold no active one."""
        names = [name for name in dict.fromkeys(request_ids) if name in self.step._table]
        if self.is_foreign:
            self.step.drop(names)
            return
        for name in names:
            self.remove(name)
        self.flying = [f for f in self.flying if any(map(self.is_live, f.places))]
        if self.open is not None and not any(map(self.is_live, self.open.places)):
            self.open = None
        self.guard()

    def release(self, states: Iterable[RequestState]) -> None:
        """Give back reserved pages, all but those that a step under way writes."""
        blocks, last = self.step.blocks, self.last
        for state in filter(self.is_live, states):
            name, length = state.request_id, blocks.length(state.request_id)
            if last is not None and state in last.ends:
                blocks.commit(name, length, state.tokens, ahead=last.ends[state] - length)
            else:
                blocks.roll_back(name, length)

    def guard(self) -> None:
        """Make the step refuse a plan of its own, and to fork, remove or drop what is under way."""
        held = self.held
        live = [r for f in held for r in f.plan.requests if self.is_live(r.state)]
        guard = dataclasses.replace(held[-1].plan, requests=tuple(live)) if held else None
        self.step._open = self._guard = guard
        self.step._is_overlapped = guard is not None


def step_problems(step: VerifyStep) -> list[str]:
    """List why a step can't be planned one ahead."""
    found = []
    if step._open is not None:
        found.append("step has an open step, accepted is one without: commit or cancel it")
    has = step.builder.backend.capabilities
    if has.query_len_support is QueryLenSupport.UNIFORM:
        found.append(
            f"backend {has.name!r} is UNIFORM, accepted are SINGLE_ONLY and VARLEN: rows past a "
            "request's limit are inert"
        )
    return found
