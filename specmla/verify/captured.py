"""The verify step as CUDA graphs: plan, all layers and acceptance, replayed over new requests.

    def forward(plan):
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        return model.logits(hidden[plan.logit_rows])

    graphs = CapturedStep(step, forward, [Bucket(8, 5), Bucket(32, 5)])
    verdict = graphs.run(proposal)
    results = step.commit(verdict.plan, verdict)

A step takes the smallest bucket that holds it. Prompts and whatever else was not captured raise,
with the reasons against every bucket; with `eager=True` they run as `VerifyStep` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.errors import ArgumentError, require
from specmla.metadata import RequestRows
from specmla.verify.accept import Acceptance, find_rule
from specmla.verify.captured_buckets import capture_problems
from specmla.verify.captured_graph import record
from specmla.verify.captured_mode import Mode, batches_of, find_mode, modes_of
from specmla.verify.captured_plan import CapturedPlan
from specmla.verify.captured_processors import ProcessorBuffers, ProcessorRoom, room_problems
from specmla.verify.judge import Verdict, decide_step, logits_problems, send_verdict
from specmla.verify.plan import LayOut, PlannedRequest, StepPlan
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch, SamplingParams
from specmla.verify.step import VerifyStep

Forward = Callable[[StepPlan], Tensor | tuple[Tensor, Tensor]]
"""Gives logits [R, W] of `plan.logit_rows`, alone or with the hidden states [T, F] of all rows."""


class Recorded(NamedTuple):
    """What a graph leaves behind."""

    acceptance: Acceptance
    packed: Tensor
    states: Tensor | None


class CapturedStep:
    """Captures a `VerifyStep` in buckets and replays it.

    Args:
        step: holds the requests; one of these at a time.
        forward: runs the model over a plan. What it reads besides the plan must stay where it is.
        buckets: shapes to capture, in any order; with `eager`, there may be none.
        sampling: parameters, of which every kind is captured (greedy; sampled, without and with
            filters; with penalties; with biases, bans or stops that `min_tokens` holds back), and
            that of all of them in one batch; their values don't matter. Of biased and banned tokens
            there is room for as many a request as the longest of them names.
        draft_probs: whether drafts of sampled requests come with distributions, float32; None for
            both. Their buffer takes B * K * W * 4 bytes of the largest bucket.
        eager: run what was not captured as `VerifyStep` does, rather than refuse it.
        history: most distinct tokens of a request, prompt and output, that penalties count; None
            for all that there can be. What it takes, and the time of a step, grow with it.
        constraints: requests may have a `TokenConstraint`: B * Q * W bytes of the largest bucket.

    Attributes:
        states: [T, F] of the last step, if `forward` gives them; overwritten by the next.

    Raises:
        ArgumentError: no bucket, ragged ones on a UNIFORM backend, arguments of other types, a
            history below 1, logits of another shape.
        RuntimeError: a forward that can't be captured.
    """

    def __init__(
        self,
        step: VerifyStep,
        forward: Forward,
        buckets: Sequence[Bucket],
        *,
        sampling: Sequence[SamplingParams] = (SamplingParams(),),
        draft_probs: bool | None = False,
        eager: bool = False,
        history: int | None = None,
        constraints: bool = False,
    ) -> None:
        require(capture_problems(buckets, sampling), "CapturedStep")
        found = room_problems(history, constraints)
        if not buckets and not eager:
            found.append("buckets is empty, accepted is one or more, or eager=True")
        if not sampling:
            found.append("sampling is empty, accepted is one or more")
        if draft_probs not in (True, False, None):
            found.append(f"draft_probs is {draft_probs!r}, accepted are True, False and None")
        require(found, "CapturedStep")
        self.step, self.forward, self.eager = step, forward, eager
        self.states: Tensor | None = None
        self._open: tuple[StepPlan, Callable[[], Recorded]] | None = None
        device, longest = step.builder.device, min(step.vocab_size, step.max_seq_len)
        self._room = ProcessorRoom.of(sampling, min(history or longest, longest), constraints)
        batches = batches_of(sampling, self._room, device)
        modes = {mode: b for b in batches for mode in modes_of(b, draft_probs)}
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        ordered = sorted(
            set(buckets), key=lambda b: (b.num_rows, b.num_requests, b.ragged, b.trees)
        )
        self._plans = self._make_plans(ordered, any(mode.has_probs for mode in modes))
        # The largest first: the others fit into the memory that it took.
        self._graphs = {
            (bucket, mode): record(self._call(self._plans[bucket], batch, mode), device, pool)
            for bucket in reversed(ordered)
            for mode, batch in modes.items()
        }
        self._modes = tuple(modes)

    def plan(
        self,
        proposal: DraftProposal | None = None,
        request_ids: Sequence[Hashable] | None = None,
    ) -> StepPlan:
        """Do what `VerifyStep.plan` does, in the buffers of a bucket.

        Raises:
            ArgumentError: as there, and a step that was not captured; nothing was reserved.
            PoolFullError: too few pages; nothing was reserved.
        """
        return self.step.plan(proposal, request_ids, layout=self)

    @torch.no_grad()
    def verify(self, plan: StepPlan) -> Verdict:
        """Run the model and judge the drafts: a replay, for a plan of the last `plan` call.

        The verdict's `acceptance` is overwritten by the next replay; its way to the host is not.

        Raises:
            ArgumentError: a plan that is not open (committed, cancelled, of another step), or not
                of this object, and `eager` is false; nothing ran.
        """
        self.step.check_open(plan)
        if self._open is not None and self._open[0] is plan:
            recorded = self._open[1]()
            self.states = recorded.states
            return send_verdict(plan, recorded.acceptance, recorded.packed)
        if not self.eager:
            raise ArgumentError("plan is not the one that this object planned last")
        logits, self.states = give_parts(self.forward(plan))
        return self.step.verify(plan, logits)

    def run(
        self,
        proposal: DraftProposal | None = None,
        request_ids: Sequence[Hashable] | None = None,
    ) -> Verdict:
        """Plan a step and verify it; commit `verdict.plan` with the verdict."""
        plan = self.plan(proposal, request_ids)
        try:
            return self.verify(plan)
        except BaseException:
            self.step.cancel(plan)
            raise

    def choose(
        self,
        planned: Sequence[PlannedRequest],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
    ) -> LayOut:
        """Find the smallest bucket that holds a step; see `PlanLayout.choose`."""
        found = []
        prompts = [r.request_id for r in planned if r.is_prompt]
        if prompts:
            found.append(f"requests {prompts[:8]} are prompts, captured are verifies alone")
        trees = [r.request_id for r in planned if r.tree]
        if trees and not any(bucket.trees for bucket in self._plans):
            found.append(f"requests {trees[:8]} bring trees, captured are chains")
        mode = find_mode(self._modes, planned, proposal, sampling)
        if isinstance(mode, str):
            found.append(mode)
        lens = [1 + r.num_drafts for r in planned]
        misfits = {bucket: bucket.problems(lens, bool(trees)) for bucket in self._plans}
        if sampling.processors is not None:
            for bucket, why in misfits.items():
                why += self._room.problems(sampling.processors, bucket.num_requests)
        fitting = next((bucket for bucket, why in misfits.items() if not why), None)
        if fitting is not None and not found and isinstance(mode, Mode):
            return self._lay_out(self._plans[fitting], self._graphs[fitting, mode])
        if self.eager:
            return self.step.lay_out
        if fitting is None:
            found += [f"{bucket}: {text}" for bucket, why in misfits.items() for text in why]
        raise ArgumentError("CapturedStep: " + "; ".join(found))

    def _lay_out(self, held: CapturedPlan, replay: Callable[[], Recorded]) -> LayOut:
        def lay_out(
            planned: Sequence[PlannedRequest],
            rows: Sequence[RequestRows],
            proposal: DraftProposal | None,
            sampling: SamplingBatch,
        ) -> StepPlan:
            plan = held.for_replay(planned, rows, proposal, sampling)
            self._open = plan, replay
            return plan

        return lay_out

    def _make_plans(self, buckets: Sequence[Bucket], has_probs: bool) -> dict[Bucket, CapturedPlan]:
        """Reserve the buffers of all buckets, smallest first; they share that of distributions."""
        builder, width = self.step.builder, self.step.vocab_size
        cells = [b.num_requests * (b.query_len - 1) * width if has_probs else 0 for b in buckets]
        size, kind = max(cells, default=0), torch.float32
        shared = torch.zeros(size, dtype=kind, device=builder.device)
        room = self._room
        kept = ProcessorBuffers(room, buckets, width, builder.device) if any(room) else None
        return {
            bucket: CapturedPlan(
                builder,
                bucket,
                width,
                shared[:count].view(bucket.num_requests, -1, width) if count else None,
                kept.tables(bucket) if kept else None,
            )
            for bucket, count in zip(buckets, cells, strict=True)
        }

    def _call(
        self, held: CapturedPlan, sampling: SamplingBatch, mode: Mode
    ) -> Callable[[], Recorded]:
        """Give what a graph holds: plan, layers, acceptance."""
        kept, rule = held.hold(sampling), find_rule(self.step.rule)

        @torch.no_grad()
        def call() -> Recorded:
            plan = held.for_capture(kept, has_probs=mode.has_probs)
            logits, states = give_parts(self.forward(plan))
            impl = self.step.acceptance
            found = logits_problems(plan, logits, self.step.vocab_size, impl)
            require(found, "CapturedStep.forward")
            return Recorded(*decide_step(plan, logits, rule, impl), states)

        return call


def give_parts(given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Give the logits of a forward, and its states if it has any."""
    return given if isinstance(given, tuple) else (given, None)
