"""Overlapped steps as CUDA graphs: the next step is a replay, queued before the last verdict.

    overlap = OverlappedStep(step)
    graphs = CapturedOverlap(overlap, forward, [Bucket(8, 5)], eager=True)
    while overlap.ready or overlap.num_flying:
        if overlap.ready:
            graphs.verify(graphs.plan(drafts))
        if overlap.num_flying == 2 or not overlap.ready:
            results = overlap.commit()

A replay makes anchors, lengths, slots and drafts exact from the older step's decisions, plans, runs
the model and judges. Prompts and drafts with distributions are not captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from specmla.bucket import Bucket
from specmla.errors import ArgumentError, require
from specmla.metadata import RequestRows
from specmla.verify.accept import Acceptance, find_rule
from specmla.verify.captured import Forward, Recorded, give_parts
from specmla.verify.captured_buckets import capture_problems
from specmla.verify.captured_graph import record
from specmla.verify.captured_late import CapturedLatePlan
from specmla.verify.captured_mode import Mode, batches_of, find_mode, modes_of
from specmla.verify.captured_processors import ProcessorBuffers, ProcessorRoom, room_problems
from specmla.verify.judge import Verdict, decide_step, logits_problems, send_verdict
from specmla.verify.overlap import OverlappedStep
from specmla.verify.overlap_flights import Flight
from specmla.verify.overlap_layout import LayOutLate
from specmla.verify.overlap_plan import Drafts, LateRequest
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch, SamplingParams


class _Open(NamedTuple):
    """The step planned last, if it is a replay."""

    plan: StepPlan
    replay: Callable[[], Recorded]


class CapturedOverlap:
    """Captures an `OverlappedStep` in buckets of chains and replays it.

    Args:
        overlap: holds the requests; add and fork them on its step, commit, remove and drop them
            there.
        forward: runs the model over a plan. What it reads besides the plan must stay where it is.
        buckets: shapes to capture, in any order; with `eager`, there may be none.
        sampling: parameters, of which every kind is captured, and that of all of them in one batch.
        eager: run what was not captured as `OverlappedStep` does, rather than refuse it.
        history: as in `CapturedStep`.

    Raises:
        ArgumentError: no bucket, buckets of trees, a history below 1, logits of another shape.
        RuntimeError: a forward that can't be captured.
    """

    def __init__(
        self,
        overlap: OverlappedStep,
        forward: Forward,
        buckets: Sequence[Bucket],
        *,
        sampling: Sequence[SamplingParams] = (SamplingParams(),),
        eager: bool = False,
        history: int | None = None,
    ) -> None:
        require(capture_problems(buckets, sampling), "CapturedOverlap")
        found = room_problems(history, False)
        if not buckets and not eager:
            found.append("buckets is empty, accepted is one or more, or eager=True")
        if any(bucket.trees for bucket in buckets):
            found.append("buckets have trees, accepted are chains: where a tree ends is not known")
        found += [] if sampling else ["sampling is empty, accepted is one or more"]
        require(found, "CapturedOverlap")
        self.overlap, self.step, self.forward, self.eager = overlap, overlap.step, forward, eager
        self._open: _Open | None = None
        device, width = self.step.builder.device, self.step.vocab_size
        longest = min(width, self.step.max_seq_len)
        self._room = ProcessorRoom.of(sampling, min(history or longest, longest), False)
        batches = batches_of(sampling, self._room, device)
        self._modes = {mode: b for b in batches for mode in modes_of(b, False)}
        most = max((b.num_requests for b in buckets), default=0)
        # Decisions of the step under way: its graph's own are overwritten by the next replay.
        emitted = max((b.query_len for b in buckets), default=1)
        pair = [torch.zeros(most, dtype=torch.int64, device=device) for _ in "ab"]
        self._before = (pair[0], pair[1], torch.full((most, emitted), -1, device=device))
        ordered = sorted(set(buckets), key=lambda b: (b.num_rows, b.num_requests, b.ragged))
        kept = ProcessorBuffers(self._room, ordered, width, device) if any(self._room) else None
        self._plans = {
            b: CapturedLatePlan(
                self.step.builder, b, width, self._before, kept.tables(b) if kept else None
            )
            for b in ordered
        }
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graphs = {
            (bucket, mode): record(self._call(self._plans[bucket], batch), device, pool)
            for bucket in reversed(ordered)
            for mode, batch in self._modes.items()
        }

    def plan(
        self, drafts: Drafts = None, request_ids: Sequence[Hashable] | None = None
    ) -> StepPlan:
        """Do what `OverlappedStep.plan` does, in the buffers of a bucket.

        Raises:
            ArgumentError: as there, and a step that was not captured; nothing was reserved.
            PoolFullError: too few pages; nothing was reserved.
        """
        return self.overlap.plan(drafts, request_ids, layout=self)

    @torch.no_grad()
    def verify(self, plan: StepPlan) -> Verdict:
        """Run the model and judge the drafts: a replay, for a plan of the last `plan` call.

        Raises:
            ArgumentError: not the step planned last, or not of this object and `eager` is false.
        """
        self.overlap.check_open(plan)
        if self._open is not None and self._open.plan is plan:
            recorded = self._open.replay()
            return self.overlap.take_off(send_verdict(plan, recorded.acceptance, recorded.packed))
        if not self.eager:
            raise ArgumentError("plan is not the one that this object planned last")
        return self.overlap.verify(plan, give_parts(self.forward(plan))[0])

    def choose(
        self,
        late: Sequence[LateRequest],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
        flight: Flight | None,
    ) -> LayOutLate | None:
        """Find the smallest bucket that holds a step; see `LateLayout.choose`."""
        found, planned = [], [r.planned for r in late]
        prompts = [r.request_id for r in planned if r.is_prompt]
        if prompts:
            found.append(f"requests {prompts[:8]} are prompts, captured are verifies alone")
        mode = find_mode(tuple(self._modes), planned, proposal, sampling)
        if proposal is not None and proposal.probs is not None:
            found.append("the proposal has probs, captured are drafts without")
        elif isinstance(mode, str):
            found.append(mode)
        room, got = len(self._before[0]), 0 if flight is None else len(flight.plan.requests)
        if got > room:
            found.append(f"the step under way has {got} requests, captured are {room}")
        emits = 0 if flight is None else 1 + flight.plan.drafts.shape[1]
        if sampling.has_processors and emits > self._before[2].shape[1]:
            most = self._before[2].shape[1]
            found.append(f"the step under way may emit {emits} tokens, captured are {most}")
        lens = [1 + r.num_drafts for r in planned]
        misfits = {bucket: bucket.problems(lens) for bucket in self._plans}
        if sampling.processors is not None:
            for bucket, why in misfits.items():
                why += self._room.problems(sampling.processors, bucket.num_requests)
        fitting = next((bucket for bucket, why in misfits.items() if not why), None)
        if fitting is not None and not found and isinstance(mode, Mode):
            return self._lay_out(fitting, mode, late, proposal, sampling, flight)
        if self.eager:
            return None
        if fitting is None:
            found += [f"{bucket}: {text}" for bucket, why in misfits.items() for text in why]
        raise ArgumentError("CapturedOverlap: " + "; ".join(found))

    def _lay_out(
        self,
        bucket: Bucket,
        mode: Mode,
        late: Sequence[LateRequest],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
        flight: Flight | None,
    ) -> LayOutLate:
        held, replay = self._plans[bucket], self._graphs[bucket, mode]

        def lay_out(rows: Sequence[RequestRows]) -> StepPlan:
            held.fill(late, rows, proposal, sampling)
            if flight is not None and flight.verdict is not None:
                self._note(len(flight.plan.requests), flight.verdict.acceptance)
            requests = tuple(r.planned for r in late)
            plan = dataclasses.replace(held.plan, requests=requests, sampling=sampling)
            plan = dataclasses.replace(plan, metadata=held.metadata.live(len(late)))
            self._open = _Open(plan, replay)
            return plan

        return lay_out

    def _note(self, count: int, decided: Acceptance) -> None:
        """Keep the decisions of the step under way; tokens that have no room are not needed."""
        accepted, after, emitted = self._before
        accepted[:count].copy_(decided.num_accepted[:count])
        after[:count].copy_(decided.next_token[:count])
        width = min(emitted.shape[1], decided.tokens.shape[1])
        emitted[:count, :width].copy_(decided.tokens[:count, :width])
        emitted[:count, width:].fill_(-1)

    def _call(self, held: CapturedLatePlan, sampling: SamplingBatch) -> Callable[[], Recorded]:
        """Give what a graph holds: exact bounds, plan, layers, acceptance."""
        kept, rule = held.hold(sampling), find_rule(self.step.rule)

        @torch.no_grad()
        def call() -> Recorded:
            plan = held.for_capture(kept)
            logits, states = give_parts(self.forward(plan))
            impl = self.step.acceptance
            found = logits_problems(plan, logits, self.step.vocab_size, impl)
            require(found, "CapturedOverlap.forward")
            return Recorded(*decide_step(plan, logits, rule, impl), states)

        return call
