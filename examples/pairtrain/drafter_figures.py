"""Trained drafters in the library's own loop, from their files, on held-out prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drafters import (
    DFlashDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    MTPDrafter,
    NgramDrafter,
    load_block_model,
    load_eagle3,
)
from pairtrain.drafter_options import DrafterOptions
from pairtrain.monitor import say
from specmla import (
    AcceptanceStats,
    DeepseekForCausalLM,
    Drafter,
    SamplingParams,
    VerifyStep,
    build_step,
    generate,
    load_mtp,
)
from specmla.verify.diversity import distinct_ngram_ratio

TEMPERATURES = {"greedy": 0.0, "temperature_1": 1.0}
LOOPING = 0.5  # a continuation with fewer distinct 4-grams than this share loops
PAGE = 64
MakeDrafter = Callable[[VerifyStep, int], Drafter]


def evaluate_drafters(
    target: DeepseekForCausalLM,
    folders: dict[str, Path],
    prompts: Sequence[list[int]],
    options: DrafterOptions,
) -> dict[str, dict[str, Any]]:
    """Measure every drafter and n-gram look-up at both temperatures."""
    makers = {"ngram": (_ngram(target), options.drafts)}
    for name, folder in folders.items():
        drafts = options.drafts if name in ("mtp", "eagle3") else options.block
        makers[name] = (_maker(name, folder, target), drafts)
    figures: dict[str, dict[str, Any]] = {}
    for name, (make, drafts) in makers.items():
        figures[name] = {"num_speculative_tokens": drafts}
        for kind, temperature in TEMPERATURES.items():
            figures[name][kind] = _measure(target, make, prompts, temperature, drafts, options)
        lengths = (f"{kind} {figures[name][kind]['tokens_per_step']:.2f}" for kind in TEMPERATURES)
        say(f"{name}: tokens a step: {', '.join(lengths)}")
    return figures


def _measure(
    target: DeepseekForCausalLM,
    make: MakeDrafter,
    prompts: Sequence[list[int]],
    temperature: float,
    drafts: int,
    options: DrafterOptions,
) -> dict[str, Any]:
    """Continue all prompts in one batch; looping continuations are left out of the averages."""
    longest = max(map(len, prompts)) + options.new_tokens + drafts + 1
    pages = len(prompts) * (longest // PAGE + 2)
    step = build_step(target, num_pages=pages, page_size=PAGE, num_draft_layers=1)
    stops = target.config.eos_token_ids
    batch = {
        i: (
            prompt,
            SamplingParams(
                temperature, seed=i, max_tokens=options.new_tokens, stop_token_ids=stops
            ),
        )
        for i, prompt in enumerate(prompts)
    }
    stats = [AcceptanceStats() for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    started = time.monotonic()
    for results in generate(target, step, batch, make(step, pages), drafts):
        for r in results:
            index = int(str(r.request_id))
            tokens[index] += r.new_tokens
            if not r.is_prompt:
                stats[index].observe(r.num_drafts, r.num_accepted, len(r.new_tokens))
    seconds = time.monotonic() - started
    return _acceptance(stats, tokens) | {
        "tokens_per_s": round(sum(map(len, tokens)) / seconds, 1),
    }


def _acceptance(
    stats: Sequence[AcceptanceStats], tokens: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Add up what was accepted of continuations that don't loop, of all if all do."""
    good = [distinct_ngram_ratio(t) >= LOOPING for t in tokens]
    counted = AcceptanceStats()
    for own, is_good in zip(stats, good, strict=True):
        if is_good or not any(good):
            counted.merge(own)
    return {
        "tokens_per_step": round(counted.tokens_per_step, 4),
        "draft_acceptance_rate": round(counted.draft_acceptance_rate, 4),
        "acceptance_rate_per_position": [
            round(rate, 4) for rate in counted.acceptance_rate_per_position
        ],
        "looping_excluded": good.count(False) if any(good) else 0,
        "prompts": len(tokens),
    }


def _ngram(target: DeepseekForCausalLM) -> MakeDrafter:
    return lambda step, pages: NgramDrafter(target.config.vocab_size)


def _maker(name: str, folder: Path, target: DeepseekForCausalLM) -> MakeDrafter:
    if name == "mtp":
        module = load_mtp(folder, target)
        return lambda step, pages: MTPDrafter(target, module, step)
    if name == "eagle3":
        head = load_eagle3(folder, target)
        return lambda step, pages: Eagle3Drafter(target, head, num_pages=pages, page_size=PAGE)
    draft = load_block_model(folder, target)
    kind = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}[name]
    return lambda step, pages: kind(target, draft, num_pages=pages, page_size=PAGE)
