"""The case with the host one step ahead of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specmla.bench.decode_case import DecodeCase, Turn
from specmla.bucket import Bucket
from specmla.generate import make_forward
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.captured_overlap import CapturedOverlap
from specmla.verify.overlap import OverlappedStep
from specmla.verify.overlap_plan import DraftsAhead


class OverlapCase(DecodeCase):
    """Plans and queues each step before the last one's verdict has arrived.

    Its drafter knows one step less: what it says is skipped as far as that step went.
    """

    @property
    def name(self) -> str:
        """What a row calls it."""
        return f"{self.contender.name} ahead"

    def _prepare(self, target: DeepseekForCausalLM, buckets: Sequence[Bucket]) -> None:
        self._overlap = OverlappedStep(self.step)
        kinds = [sampling for _, sampling in self._batch(0)]
        forward = make_forward(target, self.step)
        self._graphs = CapturedOverlap(self._overlap, forward, buckets, sampling=kinds, eager=True)

    def _drop(self, names: Sequence[int]) -> None:
        self._overlap.drop(names)

    def _advance(self, turn: Turn) -> bool:
        """Queue steps until two are under way, and await the older one."""
        overlap, began = self._overlap, time.perf_counter()
        while overlap.num_flying < 2 and overlap.ready:
            self._graphs.verify(self._graphs.plan(self._drafts()))
        queued = time.perf_counter()
        verdict = overlap._flights.flying[0].verdict
        if verdict is not None and verdict.event is not None:
            verdict.event.synchronize()
        awaited = time.perf_counter()
        results = overlap.commit()
        if self.drafter:
            self.drafter.observe(results)
        turn.host_seconds += queued - began + time.perf_counter() - awaited
        turn.count(results)
        return any(r.finish_reason for r in results)

    def _drafts(self) -> DraftsAhead | None:
        if self.drafter is None:
            return None
        wanted = self._overlap.draft_requests(self.num_drafts, ahead=True)
        return DraftsAhead(self.drafter.propose(wanted), self.num_drafts) if wanted else None
