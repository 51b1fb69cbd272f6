"""Tokens a second of whole decoding loops: plain and with drafters, captured where there is a GPU.

Cases that are compared take turns. A turn is timed from the third step on (the first computes the
prompts, the second what a drafter makes of them) until the first request ends: all that while every
request is running, in graphs of its batch size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specmla.bench.compare_run import Contender
from specmla.bucket import Bucket
from specmla.decode import Prompt
from specmla.generate import build_step, make_runner
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.hidden import committed_rows
from specmla.verify.proposal import Drafter, RequestResult
from specmla.verify.sampling import SamplingParams

PAGE = 64
PLAIN = Contender("plain", None)


@dataclass(frozen=True)
class DecodeOptions:
    """What all cases share.

    Attributes:
        num_drafts: K.
        max_tokens: new tokens of a request in a turn.
        turns: timed turns, each with other seeds.
        backend: attention backend of the target by name, the best one if None.
        captured: run steps and drafts as CUDA graphs.
    """

    num_drafts: int
    max_tokens: int
    turns: int
    backend: str | None
    captured: bool


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
        self._contender, self._prompts = contender, prompts
        self._temperature, self._options = temperature, options
        longest = max(map(len, prompts)) + options.max_tokens + options.num_drafts + 1
        self.step = build_step(
            target,
            num_pages=len(prompts) * (-(-longest // PAGE) + 1),
            page_size=PAGE,
            backend=options.backend,
            prefix_caching=False,  # a later turn would find the prompts of the first
            num_draft_layers=int(contender.make is not None),
        )
        self.drafter = contender.make(self.step) if contender.make else None
        drafts = options.num_drafts if self.drafter else 0
        buckets = [Bucket(len(prompts), 1 + drafts)] if options.captured else False
        self._runner = make_runner(
            target, self.step, dict(enumerate(self._batch(0))), self.drafter, drafts, buckets
        )

    @torch.no_grad()
    def run(self, seed: int) -> Turn:
        """Run a turn."""
        if self.drafter is not None and not hasattr(self.drafter, "capture"):
            assert self._contender.make is not None
            self.drafter = self._contender.make(self.step)  # one that has learnt no answer
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
            names = list(range(len(self._prompts)))
            self.step.drop(names)
            if self.drafter:
                for name in names:
                    self.drafter.reset(name)
        return turn

    def _batch(self, seed: int) -> list[Prompt]:
        """Give the requests; none ends before its last token."""
        count = len(self._prompts)
        most = self._options.max_tokens
        return [
            (prompt, SamplingParams(self._temperature, seed=seed * count + i, max_tokens=most))
            for i, prompt in enumerate(self._prompts)
        ]

    def _advance(self, turn: Turn) -> bool:
        """Run one step; tell whether a request has ended."""
        step, drafter, runner = self.step, self.drafter, self._runner
        began = time.perf_counter()
        wanted = step.draft_requests(self._options.num_drafts) if drafter else []
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


def measure_decode(
    target: DeepseekForCausalLM,
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    options: DecodeOptions,
    tell: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Measure plain decoding and every contender over one batch, in turns; a row each.

    Raises:
        UnsupportedError: graphs of a model that waits for the device.
    """
    cases = []
    for contender in (PLAIN, *contenders):
        tell(f"B={len(prompts)} T={temperature:g} {contender.name}")
        cases.append(DecodeCase(target, contender, prompts, temperature, options))
    for case in cases:  # kernels are compiled, clocks are up
        case.run(options.turns)
    turns = [[case.run(seed) for case in cases] for seed in range(options.turns)]
    return [
        _row(case, [turn[i] for turn in turns], [turn[0] for turn in turns])
        for i, case in enumerate(cases)
    ]


def decode_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows for people."""
    lines = [
        f"{'B':>3} {'T':>4} {'drafter':<14} {'tokens/s':>10} {'steps/s':>9} {'tokens':>7} "
        f"{'speed-up':>9} {'step µs':>9} {'host µs':>9}"
    ]
    for r in rows:
        host = "-" if r["host_us"] is None else f"{r['host_us']:.0f}"
        lines.append(
            f"{r['requests']:3} {r['temperature']:4g} {r['drafter']:<14} {r['tokens_per_s']:10.0f} "
            f"{r['steps_per_s']:9.1f} {r['tokens_per_step']:7.2f} {r['speedup']:9.2f} "
            f"{r['step_us']:9.0f} {host:>9}"
        )
    return "\n".join(lines)


def _row(case: DecodeCase, turns: Sequence[Turn], plain: Sequence[Turn]) -> dict[str, Any]:
    speeds = [t.tokens / t.seconds for t in turns]
    gains = [s * p.seconds / p.tokens for s, p in zip(speeds, plain, strict=True)]
    steps = sum(t.steps for t in turns)
    drafted = sum(t.drafted for t in turns)
    options, builder = case._options, case.step.builder
    is_gpu = builder.device.type == "cuda"
    return {
        "drafter": case._contender.name,
        "requests": len(case._prompts),
        "temperature": case._temperature,
        "drafts": options.num_drafts if case.drafter else 0,
        "captured": options.captured,
        "backend": builder.backend.capabilities.name,
        "draft_backend": _backend_of(case.drafter),
        "turns": len(turns),
        "steps": steps,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "steps_per_s": statistics.median(t.steps / t.seconds for t in turns),
        "step_us": statistics.median(1e6 * t.seconds / t.steps for t in turns),
        "host_us": (
            statistics.median(1e6 * t.host_seconds / t.steps for t in turns) if is_gpu else None
        ),
        "tokens_per_step": sum(t.tokens for t in turns) / steps / len(case._prompts),
        "draft_acceptance_rate": sum(t.accepted for t in turns) / drafted if drafted else None,
        "speedup": statistics.median(gains),
        "speedup_range": [min(gains), max(gains)],
    }


def _backend_of(drafter: Drafter | None) -> str | None:
    """Name the backend of a drafter's own cache, if it has one."""
    for holder in (drafter, getattr(drafter, "cache", None)):
        backend = getattr(getattr(holder, "builder", None), "backend", None)
        if backend is not None:
            return str(backend.capabilities.name)
    return None
