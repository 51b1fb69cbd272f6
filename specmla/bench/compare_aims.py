"""What a comparison says of the aims: tokens a step, block verification, trees, speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

TOKENS = {0.0: 3.2, 1.0: 2.3}
"""Tokens a step that DFlash or DSpark should reach, by temperature."""
SPEED = 1.5
"""Times plain decoding."""
_BLOCKS = ("dflash", "dspark")


def compare_aims(found: Mapping[str, Any]) -> str:
    """Give one paragraph of verdicts; an aim that nothing was run for is left out."""
    rows, gains = found["rows"], found["gains"]
    parts = [_tokens(rows, temperature, aim) for temperature, aim in TOKENS.items()]
    parts.append(_gains(gains, "block over token_level", "block verification over token-level"))
    parts.append(_gains(gains, "tree over chain", "trees over chains of the same depth"))
    parts += [_speed(rows, temperature) for temperature in TOKENS]
    return f"Aims on these prompts: {'; '.join(part for part in parts if part)}."


def _tokens(rows: Sequence[Mapping[str, Any]], temperature: float, aim: float) -> str:
    """Name the better of the block drafters' chains, under the rule that serves it best."""
    known = [r for r in rows if r["drafter"] in _BLOCKS and r["temperature"] == temperature]
    if not known:
        return ""
    best = max(known, key=lambda row: float(row["tokens_per_step"]))
    value = best["tokens_per_step"]
    verdict = "reached" if value >= aim else "not reached"
    return (
        f"{aim:g} tokens a step of DFlash or DSpark at T = {temperature:g}: {verdict} "
        f"({best['drafter']}, {best['rule']} {value:.2f})"
    )


def _gains(gains: Sequence[Mapping[str, Any]], what: str, label: str) -> str:
    known = [gain for gain in gains if gain["what"] == what]
    if not known:
        return ""
    values = [gain["gain"] for gain in known]
    least = min(known, key=lambda gain: float(gain["gain"]))
    mean = statistics.fmean(values)
    verdict = "reached" if mean >= 0 else "not reached"
    return (
        f"{label}, mean of {len(values)} cases: {verdict} ({mean:+.3f}; least "
        f"{least['gain']:+.3f}, {least['drafter']}, {least['rule']}, T = {least['temperature']:g})"
    )


def _speed(rows: Sequence[Mapping[str, Any]], temperature: float) -> str:
    known = [row for row in rows if row["temperature"] == temperature]
    if not known:
        return ""
    good = [f"{r['drafter']} ({r['rule']})" for r in known if r["speedup"] >= SPEED]
    return f"{SPEED:g} times plain decoding at T = {temperature:g}: {', '.join(good) or 'none'}"
