"""Host time of a step's bookkeeping: `VerifyStep.plan` and `commit`, without a model.

Logits are made so that request i accepts (i + step) mod (K + 1) drafts: every roll-back length
occurs in every step. The device is awaited before `commit`, so that its wait for the verdict costs
nothing and only the host's work is left.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specmla.backends.base import Requirements
from specmla.backends.select import select_backend
from specmla.builder import MetadataBuilder
from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep

VOCAB_SIZE = 4096
NUM_HEADS, KV_LORA_RANK, ROPE_DIM = 16, 512, 64
WARM_UP_STEPS = 5

T = TypeVar("T")


@dataclass(frozen=True)
class StepOptions:
    """B requests of `prompt_len` cached tokens and K drafts a step; lengths grow as they decode."""

    num_requests: int
    num_drafts: int
    prompt_len: int
    page_size: int
    backend: str | None
    device: torch.device
    dtype: torch.dtype
    reps: int


def measure_step(options: StepOptions) -> dict[str, Any]:
    """Run steps and give the medians in microseconds, with the options they hold for.

    Raises:
        UnsupportedError: the backend can't plan here.
    """
    step = _filled_step(options)
    rng = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {"plan_us": [], "commit_us": [], "plan_commit_us": []}
    emitted = 0
    for i in range(WARM_UP_STEPS + options.reps):
        proposal = _proposal(options, rng)
        plan, plan_us = _timed(functools.partial(step.plan, proposal), options.device)
        verdict = step.verify(plan, _logits(plan, i))
        results, commit_us = _timed(functools.partial(step.commit, plan, verdict), options.device)
        if i >= WARM_UP_STEPS:
            emitted += sum(len(r.new_tokens) for r in results)
            for name, value in zip(times, (plan_us, commit_us, plan_us + commit_us), strict=True):
                times[name].append(value)
    return {
        "requests": options.num_requests,
        "drafts": options.num_drafts,
        "prompt_len": options.prompt_len,
        "page_size": options.page_size,
        "backend": step.builder.backend.capabilities.name,
        "device": options.device.type,
        "reps": options.reps,
        **{name: statistics.median(values) for name, values in times.items()},
        "tokens_per_step": emitted / options.reps / options.num_requests,
    }


def step_lines(figures: dict[str, Any]) -> str:
    """Format the figures for people."""
    return (
        f"B={figures['requests']} K={figures['drafts']} cached={figures['prompt_len']} "
        f"backend={figures['backend']} device={figures['device']}\n"
        f"plan {figures['plan_us']:.1f} µs + commit {figures['commit_us']:.1f} µs; together "
        f"{figures['plan_commit_us']:.1f} µs (medians of {figures['reps']} steps, host time)"
    )


def _filled_step(options: StepOptions) -> VerifyStep:
    """Wire a one-layer step and bring every request to its prompt's length."""
    need = Requirements(
        device=options.device,
        dtype=options.dtype,
        num_heads=NUM_HEADS,
        kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=ROPE_DIM,
        page_size=options.page_size,
    )
    new_tokens = (WARM_UP_STEPS + options.reps + 1) * (options.num_drafts + 1)
    max_seq_len = options.prompt_len + new_tokens + 1
    num_pages = options.num_requests * (-(-max_seq_len // options.page_size) + 1)
    width = KV_LORA_RANK + ROPE_DIM
    step = VerifyStep(
        cache=LatentCache(1, num_pages, options.page_size, width, options.dtype, options.device),
        blocks=BlockManager(num_pages, options.page_size),
        builder=MetadataBuilder(
            backend=select_backend(need, options.backend),
            page_size=options.page_size,
            num_pages=num_pages,
            num_heads=NUM_HEADS,
            kv_lora_rank=KV_LORA_RANK,
            device=options.device,
            max_seq_len=max_seq_len,
        ),
        vocab_size=VOCAB_SIZE,
        max_seq_len=max_seq_len,
    )
    rng = random.Random(0)
    for i in range(options.num_requests):
        step.add(
            i, [rng.randrange(VOCAB_SIZE) for _ in range(options.prompt_len)], SamplingParams()
        )
    plan = step.plan()
    logits = torch.zeros(len(plan.logit_rows), VOCAB_SIZE, device=options.device)
    step.commit(plan, step.verify(plan, logits))
    return step


def _proposal(options: StepOptions, rng: torch.Generator) -> DraftProposal:
    b, k = options.num_requests, options.num_drafts
    tokens = torch.randint(VOCAB_SIZE, (b, k), generator=rng)
    return DraftProposal(tuple(range(b)), (k,) * b, tokens.to(options.device))


def _logits(plan: StepPlan, step_index: int) -> Tensor:
    """Logits [R, W] whose largest entry follows the drafts as far as they are to be accepted."""
    b, k = plan.drafts.shape
    column = torch.arange(k + 1, device=plan.drafts.device)
    accepted = (torch.arange(b, device=plan.drafts.device) + step_index) % (k + 1)
    follow = torch.cat([plan.drafts, plan.drafts.new_zeros(b, 1)], dim=1)
    token = torch.where(column < accepted[:, None], follow, (follow + 1) % VOCAB_SIZE)
    logits = torch.zeros(b * (k + 1), VOCAB_SIZE, device=plan.drafts.device)
    return logits.scatter_(1, token.view(-1, 1), 1.0)


def _timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    return result, 1e6 * (time.perf_counter() - start)
