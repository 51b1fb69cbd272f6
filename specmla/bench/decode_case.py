"""One case of `bench decode`: a drafter over a batch, its step and graphs made once."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from specmla.bench.compare_run import Contender
from specmla.bucket import Bucket
from specmla.decode import Prompt
from specmla.generate import build_step, make_runner
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.hidden import committed_rows
from specmla.verify.proposal import RequestResult
from specmla.verify.sampling import SamplingParams

PAGE = 64


@dataclass(frozen=True)
class DecodeOptions:
    """What all cases share.

    Attributes:
        num_drafts: K.
        max_tokens: new tokens of a request in a turn.
        turns: timed turns, each with other seeds.
        backend: attention backend of the target by name, the best one if None.
        captured: run steps and drafts as CUDA graphs.
        overlapped: beside plain decoding, and drafters that can draft a step ahead, the same with
            the host one step ahead.
        acceptance: "torch" or "triton" decide, as in `build_step`; plain decoding too.
    """

    num_drafts: int
    max_tokens: int
    turns: int
    backend: str | None
    captured: bool
    overlapped: bool = False
    acceptance: str = "torch"


@dataclass
class Turn:
    """What one turn took, in seconds, and what it gave."""

    seconds: float = 0.0
    host_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def count(self, results: Sequence[RequestResult]) -> None:
        """Add a step."""
        self.steps += 1
        for result in results:
            self.tokens += len(result.new_tokens)
            self.drafted += result.num_drafts
            self.accepted += result.num_accepted


class DecodeCase:
    """One contender over one batch: step, drafter and graphs are made once.

    Args:
        target: the model.
        contender: makes the drafter; a tree's is not served.
        prompts: B of them.
        temperature: 0 for greedy.
        options: of all cases.
    """

    def __init__(
        self,
        target: DeepseekForCausalLM,
        contender: Contender,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        options: DecodeOptions,
    ) -> None:
        self.contender, self.prompts = contender, prompts
        self.temperature, self.options = temperature, options
        longest = max(map(len, prompts)) + options.max_tokens + options.num_drafts + 1
        self.step = build_step(
            target,
            num_pages=len(prompts) * (-(-longest // PAGE) + 1),
            page_size=PAGE,
            backend=options.backend,
            acceptance=options.acceptance,
            prefix_caching=False,  # a later turn would find the prompts of the first
            num_draft_layers=int(contender.make is not None),
        )
        self.drafter = contender.make(self.step) if contender.make else None
        self.num_drafts = options.num_drafts if self.drafter else 0
        bucket = Bucket(len(prompts), 1 + self.num_drafts)
        self._prepare(target, [bucket] if options.captured else [])

    @property
    def name(self) -> str:
        """What a row calls it."""
        return self.contender.name

    def _prepare(self, target: DeepseekForCausalLM, buckets: Sequence[Bucket]) -> None:
        """Capture what runs."""
        batch: dict[Hashable, Prompt] = dict(enumerate(self._batch(0)))
        self._runner = make_runner(target, self.step, batch, self.drafter, self.num_drafts, buckets)

    @torch.no_grad()
    def run(self, seed: int) -> Turn:
        """Run a turn."""
        if self.drafter is not None and not hasattr(self.drafter, "capture"):
            assert self.contender.make is not None
            self.drafter = self.contender.make(self.step)  # one that has learnt no answer
        turn = Turn()
        for name, (tokens, sampling) in enumerate(self._batch(seed)):
            self.step.add(name, tokens, sampling)
        try:
            for _ in range(2):
                self._advance(Turn())
            began = time.perf_counter()
            while not self._advance(turn):
                pass
            turn.seconds = time.perf_counter() - began
        finally:
            names = list(range(len(self.prompts)))
            self._drop(names)
            if self.drafter:
                for name in names:
                    self.drafter.reset(name)
        return turn

    def _drop(self, names: Sequence[int]) -> None:
        self.step.drop(names)

    def _batch(self, seed: int) -> list[Prompt]:
        """Give the requests; none ends before its last token."""
        count = len(self.prompts)
        most = self.options.max_tokens
        return [
            (prompt, SamplingParams(self.temperature, seed=seed * count + i, max_tokens=most))
            for i, prompt in enumerate(self.prompts)
        ]

    def _advance(self, turn: Turn) -> bool:
        """Run one step; tell whether a request has ended."""
        step, drafter, runner = self.step, self.drafter, self._runner
        began = time.perf_counter()
        wanted = step.draft_requests(self.num_drafts) if drafter else []
        verdict = runner.run(drafter.propose(wanted) if drafter and wanted else None)
        queued = time.perf_counter()
        if verdict.event is not None:
            verdict.event.synchronize()
        awaited = time.perf_counter()
        results = step.commit(verdict.plan, verdict)
        if drafter:
            states = runner.states
            rows = None if states is None else committed_rows(verdict.plan, results, states)
            drafter.observe(results, rows)
        turn.host_seconds += queued - began + time.perf_counter() - awaited
        turn.count(results)
        return any(r.finish_reason for r in results)
