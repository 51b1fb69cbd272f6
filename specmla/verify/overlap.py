"""The verify step with the host one step ahead: a step is planned before the last one's verdict.

    overlap = OverlappedStep(step)
    while overlap.ready or overlap.num_flying:
        if overlap.ready:
            plan = overlap.plan(drafts)
            overlap.verify(plan, forward(plan))     # enqueued behind the step under way
        if overlap.num_flying == 2 or not overlap.ready:
            results = overlap.commit()              # of the older one, which awaits its copy

Anchors, lengths, positions and slots of a request under way are made on the device from the older
step's decisions; on the host there are bounds, and pages for both steps are reserved: 2 (K + 1)
rows. A request that turns out to have ended was run once more: nothing of that is used. Its pages
are given back at once, since whoever gets them writes on the same stream, behind that step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from specmla.errors import ArgumentError, NumericsError, require
from specmla.staging import send_arrays
from specmla.verify.judge import Decision, Verdict
from specmla.verify.overlap_device import Anchors, Settler
from specmla.verify.overlap_flights import Flights, step_problems
from specmla.verify.overlap_layout import LateLayout, lay_out_late, reserve_late
from specmla.verify.overlap_plan import (
    Drafts,
    DraftsAhead,
    ends_under_way,
    late_arrays,
    late_draft_requests,
    late_problems,
    plan_late,
)
from specmla.verify.plan import PlannedRequest, StepPlan
from specmla.verify.processors.attach import with_processors
from specmla.verify.proposal import DraftRequest, RequestResult
from specmla.verify.step import VerifyStep


class OverlappedStep:
    """Runs a `VerifyStep` with up to one step under way while the next is planned.

    All steps run on one stream. Chains only, and no constraints. Add and fork requests on the step
    itself; plan, commit, remove and drop them here.

    Args:
        step: holds the requests; no step of its own may be open.

    Raises:
        ArgumentError: an open step, or a UNIFORM backend (an inert row needs an extent of its own).
    """

    def __init__(self, step: VerifyStep) -> None:
        require(step_problems(step), "OverlappedStep")
        self.step = step
        self._table, self._sampling = step._table, step._sampling
        self._flights = Flights(step)

    @property
    def num_flying(self) -> int:
        """Steps that were verified and not committed: 0, 1 or 2."""
        return len(self._flights.flying)

    @property
    def ready(self) -> tuple[Hashable, ...]:
        """Requests that can be planned now: all but those that end with the step under way."""
        names, last = () if self._flights.problems else self._table, self._flights.last
        return tuple(n for n in names if not ends_under_way(self._table[n], last))

    def draft_requests(
        self,
        num_drafts: int | Mapping[Hashable, int],
        request_ids: Iterable[Hashable] | None = None,
        *,
        ahead: bool = False,
    ) -> list[DraftRequest]:
        """Give what can be drafted for in the next step, with limits.

        `tokens` are the committed ones: those of the step under way are not among them. Drafts from
        the device continue after `anchors`.

        Args:
            num_drafts: most drafts to verify, for all requests or by request (absent: 0).
            request_ids: all that are `ready` if None.
            ahead: for `DraftsAhead`: ask for as many more as the step under way may emit.

        Raises:
            ArgumentError: unknown names, counts below 0, or no step can be planned now.
        """
        require(self._flights.problems, "OverlappedStep.draft_requests")
        names = list(self.ready if request_ids is None else request_ids)
        return late_draft_requests(
            self._table, names, num_drafts, self.step.blocks.length, self._flights.last, ahead=ahead
        )

    def anchors(self, request_ids: Sequence[Hashable]) -> Anchors:
        """Give where requests will stand in the next step, on the device; nothing waits for it.

        What a drafter on the device continues from. A request whose prompt was not computed yet has
        the prompt's last token.

        Raises:
            ArgumentError: an unknown name, or no step can be planned now.
        """
        require(self._flights.problems, "OverlappedStep.anchors")
        states = [self._table[name] for name in request_ids]
        late = plan_late(states, lambda n: len(self._table[n].tokens) - 1, self._flights.last, None)
        sent = send_arrays(late_arrays(late), self.step.builder.device)
        return self._settler().anchors(sent)

    def plan(
        self,
        drafts: Drafts = None,
        request_ids: Sequence[Hashable] | None = None,
        layout: LateLayout | None = None,
    ) -> StepPlan:
        """Reserve pages for every row that there may be and build the step.

        Args:
            drafts: a `DraftProposal` that continues after `anchors` (of tensors on the device, if
                the host does not know those), or `DraftsAhead`. Drafts past a request's limits are
                not verified.
            request_ids: requests of this step, all that are `ready` if None.
            layout: lays it out in buffers of its own (`CapturedOverlap`); new tensors if None.

        Returns:
            The plan. Of requests under way, `requests` has bounds; the tensors are exact.

        Raises:
            ArgumentError: as `VerifyStep.plan` (one that it planned itself included), and two steps
                under way, trees, requests that have a constraint or end with the step under way;
                all reasons are listed.
            PoolFullError: too few pages; nothing was reserved.
        """
        require(self._flights.problems, "OverlappedStep.plan")
        names = list(self.ready if request_ids is None else request_ids)
        states, last = [self._table[name] for name in names], self._flights.last
        require(late_problems(names, states, last, drafts), "OverlappedStep.plan")
        proposal = drafts.proposal if isinstance(drafts, DraftsAhead) else drafts
        if proposal is not None and isinstance(proposal.probs, Tensor):
            self.step.check_drafter(proposal.probs.shape[-1])
        late = plan_late(states, self.step.blocks.length, last, drafts)
        sampling = self._sampling.get(r.planned.state.sampling for r in late)
        planned, step = [r.planned for r in late], self.step
        sampling = with_processors(sampling, planned, proposal, step.vocab_size, step._history)
        lay = None if layout is None else layout.choose(late, proposal, sampling, last)
        if lay is None:
            builder, settle = self.step.builder, self._settler()
            lay = partial(lay_out_late, builder, settle, late, proposal, sampling)
        return reserve_late(self._flights, late, lay)

    def verify(self, plan: StepPlan, logits: Tensor) -> Verdict:
        """Judge the drafts; nothing waits for the device. From here on the step is under way.

        Args:
            plan: the planned step.
            logits: [R, W] of `plan.logit_rows`.

        Raises:
            ArgumentError: not the step planned last, or logits that `VerifyStep.verify` refuses.
        """
        self.check_open(plan)
        return self.take_off(self.step._judge(plan, logits))

    def check_open(self, plan: StepPlan) -> None:
        """Refuse what is not the step planned last, or was verified.

        Raises:
            ArgumentError: it is not.
        """
        if self._flights.open is None or plan is not self._flights.open.plan:
            raise ArgumentError("plan is not the step planned last; each is verified once")

    def take_off(self, verdict: Verdict) -> Verdict:
        """Take the verdict of the planned step, from whoever judged it; it is under way."""
        self._flights.take_off(verdict)
        return verdict

    def commit(self) -> list[RequestResult]:
        """Await the older step's verdict and move its requests on, in plan order.

        Requests that ended before it or were removed are left out. Finished ones leave: their pages
        are given back and their names are free again, though the next step may hold them.

        Raises:
            ArgumentError: no step is under way.
            NumericsError: a flagged row; every step under way is cancelled and no length changed.
        """
        flights = self._flights
        verdict = flights.flying[0].verdict if flights.flying else None
        if verdict is None:
            raise ArgumentError("commit: no step is under way; plan and verify one first")
        decided = zip(verdict.plan.requests, verdict.wait(), strict=True)
        live = [(r, d) for r, d in decided if flights.is_live(r.state)]
        self._refuse_flagged(live)
        flights.flying.pop(0)
        results = [self.step._advance(r, d, flights.rows_ahead(r.state)) for r, d in live]
        flights.settle_ends(r.state for r, _ in live)
        flights.guard()
        return results

    def cancel(self, plan: StepPlan) -> None:
        """Give back what a planned step reserved; one that was verified can't be cancelled."""
        if self._flights.open is None or plan is not self._flights.open.plan:
            raise ArgumentError("plan is not the step planned last; there is nothing to cancel")
        self._flights.cancel()

    def remove(self, request_id: Hashable) -> None:
        """Drop a request at any time and give its pages back; what is under way of it is lost.

        To preempt it, add it again later with its seed and, as `output`, what it had emitted: it
        goes on as it would have from there.
        """
        self._flights.remove(request_id)

    def drop(self, request_ids: Iterable[Hashable]) -> None:
        """Forget requests, whatever happens to them, and steps that hold no others.

        Names that are not active are ignored: this is the clean-up after an error.
        """
        self._flights.drop(request_ids)

    def _settler(self) -> Settler:
        verdict = None if self._flights.last is None else self._flights.last.verdict
        before = None if verdict is None else verdict.acceptance
        return Settler(before, self.step.builder.page_size, self.step.vocab_size)

    def _refuse_flagged(self, decided: Sequence[tuple[PlannedRequest, Decision]]) -> None:
        flagged = [r.request_id for r, d in decided if d.flagged]
        if not flagged:
            return
        self._flights.cancel_all()
        raise NumericsError(
            f"logits or draft probabilities hold NaN or no finite value for requests {flagged}; "
            "all steps under way are cancelled",
            flagged,
        )
