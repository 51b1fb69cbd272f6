"""Tokens a second of whole decoding loops: plain and with drafters, captured where there is a GPU.

Cases that are compared take turns. A turn is timed from the third step on (the first computes the
prompts, the second what a drafter makes of them) until the first request ends: all that while every
request is running, in graphs of its batch size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from specmla.bench.compare_run import Contender
from specmla.bench.decode_case import DecodeCase, DecodeOptions, Turn
from specmla.bench.decode_overlap import OverlapCase
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.proposal import Drafter

PLAIN = Contender("plain", None)


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
    cases: list[DecodeCase] = []
    given = (target, prompts, temperature, options)
    for contender in (PLAIN, *contenders):
        tell(f"B={len(prompts)} T={temperature:g} {contender.name}")
        cases.append(_case(DecodeCase, contender, *given))
        drafter = cases[-1].drafter
        if options.overlapped and (drafter is None or getattr(drafter, "drafts_ahead", False)):
            cases.append(_case(OverlapCase, contender, *given))
    for case in cases:  # kernels are compiled, clocks are up
        case.run(options.turns)
    turns = [[case.run(seed) for case in cases] for seed in range(options.turns)]
    return [
        _row(case, [turn[i] for turn in turns], [turn[0] for turn in turns])
        for i, case in enumerate(cases)
    ]


def _case(
    kind: type[DecodeCase],
    contender: Contender,
    target: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    options: DecodeOptions,
) -> DecodeCase:
    return kind(target, contender, prompts, temperature, options)


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
    options, builder = case.options, case.step.builder
    is_gpu = builder.device.type == "cuda"
    return {
        "drafter": case.name,
        "requests": len(case.prompts),
        "temperature": case.temperature,
        "drafts": case.num_drafts,
        "captured": options.captured,
        "acceptance": options.acceptance,
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
        "tokens_per_step": sum(t.tokens for t in turns) / steps / len(case.prompts),
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
