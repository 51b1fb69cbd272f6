"""Tokens per second of whole verify steps: random weights, real steps, acceptance that is given.

The model runs as it would; then the logits of each draft that is to stand are made to favour it,
and those of the others to refuse it. All the rest is real: plan, layers, acceptance, roll-back,
lengths that grow by what was accepted.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.generate import build_step
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.grouped_experts import group_experts
from specmla.verify.captured import CapturedStep
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep

WARM_UP_STEPS = 3
FAVOUR = 1e4
"""A logit above all that a model of random weights gives, and finite in float16."""


@dataclass(frozen=True)
class ModelStepOptions:
    """What all batch sizes share.

    Attributes:
        config: of the layers that are run.
        acceptance: chance of each draft if all before it stand; as many as the most drafts.
        context: cached tokens of a request at the start.
        page_size, backend, device, dtype, reps: as elsewhere; reps are steps.
        draft_us: what a draft costs, added to a step for each of its K; 0: drafting is free.
    """

    config: DeepseekConfig
    acceptance: tuple[float, ...]
    context: int
    page_size: int
    backend: str | None
    device: torch.device
    dtype: torch.dtype
    reps: int
    draft_us: float = 0.0


def make_model(options: ModelStepOptions) -> DeepseekForCausalLM:
    """Make the layers with random weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(options.dtype)
    try:
        with options.device:
            model = DeepseekForCausalLM(options.config)
    finally:
        torch.set_default_dtype(before)
    model.reset_parameters(generator=torch.Generator(options.device).manual_seed(0))
    if options.device.type == "cuda":  # the loop over experts waits for the device
        group_experts(model)
    return model.eval()


@torch.no_grad()
def measure_batch(
    model: DeepseekForCausalLM, num_requests: int, options: ModelStepOptions
) -> list[dict[str, Any]]:
    """Give a row for each number of drafts, from none to as many as `acceptance` has."""
    rows = []
    for drafts in range(len(options.acceptance) + 1):
        expected = expected_tokens(options.acceptance[:drafts])
        row: dict[str, Any] = {"eager_us": None, "captured_us": None}
        kinds = ["eager", *(["captured"] if options.device.type == "cuda" else [])]
        for kind in kinds:
            us, tokens, backend = _run(model, num_requests, drafts, kind, options)
            row |= {f"{kind}_us": us, "measured_tokens": tokens, "backend": backend}
        best = row["captured_us"] or row["eager_us"]
        step_us = best + drafts * options.draft_us
        rows.append(
            {
                "requests": num_requests,
                "drafts": drafts,
                "context": options.context,
                "layers": options.config.num_layers,
                "heads": options.config.attention.num_heads,
                "dtype": str(options.dtype).removeprefix("torch."),
                "device": options.device.type,
                "acceptance": list(options.acceptance[:drafts]),
                "draft_us": options.draft_us,
                **row,
                "tokens_per_step": expected,
                "tokens_per_s": num_requests * expected / step_us * 1e6,
            }
        )
    return rows


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Give the tokens of a step: one, and each draft with the chance that all up to it stand."""
    return 1.0 + sum(math.prod(acceptance[: i + 1]) for i in range(len(acceptance)))


def break_even(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Say which K is the fastest of one batch size, and the largest that is no slower than none."""
    rates = {row["drafts"]: row["tokens_per_s"] for row in rows}
    return {
        "best_drafts": max(rates, key=lambda k: rates[k]),
        "break_even_drafts": max(k for k, rate in rates.items() if rate >= rates[0]),
    }


def model_step_lines(rows: Sequence[dict[str, Any]], summaries: Sequence[dict[str, Any]]) -> str:
    """Format the rows for people."""
    lines = [
        f"{'B':>4} {'K':>3} {'eager µs':>10} {'captured µs':>12} {'tokens':>7} {'tokens/s':>10}"
    ]
    for r in rows:
        captured = "-" if r["captured_us"] is None else f"{r['captured_us']:.1f}"
        lines.append(
            f"{r['requests']:4} {r['drafts']:3} {r['eager_us']:10.1f} {captured:>12} "
            f"{r['tokens_per_step']:7.2f} {r['tokens_per_s']:10.1f}"
        )
    lines += [
        f"B={s['requests']}: best K {s['best_drafts']}, break-even K {s['break_even_drafts']}"
        for s in summaries
    ]
    return "\n".join(lines)


class SyntheticForward:
    """Runs the model over a plan, then makes drafts stand or fall.

    Attributes:
        stands: [B, K] bool, to be filled before a step; a draft stands if all before it do.
    """

    def __init__(
        self, model: DeepseekForCausalLM, step: VerifyStep, num_requests: int, num_drafts: int
    ) -> None:
        self.model, self.step = model, step
        shape, device = (num_requests, num_drafts), step.builder.device
        self.stands = torch.zeros(shape, dtype=torch.bool, device=device)

    def __call__(self, plan: StepPlan) -> Tensor:
        """Give logits [B * (K + 1), W]."""
        step, width = self.step, self.step.vocab_size
        hidden = self.model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        logits = self.model.logits(hidden[plan.logit_rows])
        other = (plan.drafts + 1) % width
        wanted = torch.where(self.stands, plan.drafts, other)
        wanted = torch.nn.functional.pad(wanted, (0, 1))
        return logits.scatter(1, wanted.view(-1, 1), FAVOUR)


def _run(
    model: DeepseekForCausalLM, num_requests: int, drafts: int, kind: str, options: ModelStepOptions
) -> tuple[float, float, str]:
    """Run steps; gives the median of their wall times, tokens a request and step, the backend."""
    gc.collect()  # a captured step is a cycle, and may hold a cache as large as this one's
    steps, device = WARM_UP_STEPS + options.reps, options.device
    step = _filled_step(model, num_requests, (steps + 1) * (drafts + 1), options)
    forward = SyntheticForward(model, step, num_requests, drafts)
    buckets = [Bucket(num_requests, drafts + 1, ragged=False)] if kind == "captured" else []
    runner = CapturedStep(step, forward, buckets, eager=not buckets)
    draw = torch.Generator(device).manual_seed(1)
    shape = (steps, num_requests, drafts)
    rates = torch.tensor(options.acceptance[:drafts], device=device)
    stands = torch.rand(shape, generator=draw, device=device) < rates
    tokens = torch.randint(step.vocab_size, shape, generator=draw, device=device)
    names, times, emitted = tuple(range(num_requests)), [], 0
    for i in range(steps):
        forward.stands.copy_(stands[i])
        proposal = DraftProposal(names, (drafts,) * num_requests, tokens[i]) if drafts else None
        start = time.perf_counter()
        verdict = runner.run(proposal)
        results = step.commit(verdict.plan, verdict)  # awaits the device
        times.append(1e6 * (time.perf_counter() - start))
        if i >= WARM_UP_STEPS:
            emitted += sum(len(r.new_tokens) for r in results)
    per_step = emitted / options.reps / num_requests
    name = step.builder.backend.capabilities.name
    return statistics.median(times[WARM_UP_STEPS:]), per_step, name


def _filled_step(
    model: DeepseekForCausalLM, num_requests: int, new_tokens: int, options: ModelStepOptions
) -> VerifyStep:
    """Wire a step and bring every request to its context; what the cache holds is random."""
    limit = options.context + new_tokens + 2
    step = build_step(
        model,
        num_pages=num_requests * (-(-limit // options.page_size) + 1),
        page_size=options.page_size,
        backend=options.backend,
        max_seq_len=limit,
        prefix_caching=False,
    )
    draw = torch.Generator().manual_seed(0)
    for i in range(step.cache.num_layers):
        step.cache.layer(i).normal_()
    for name in range(num_requests):
        prompt = torch.randint(step.vocab_size, (options.context,), generator=draw).tolist()
        step.add(name, prompt, SamplingParams())
    plan = step.plan()
    logits = torch.zeros(len(plan.logit_rows), step.vocab_size, device=options.device)
    step.commit(plan, step.verify(plan, logits))
    return step
