"""From runs to the rows of a comparison: means, bootstrap intervals, gains."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from specmla.bench.bootstrap import interval, ratios, resamples
from specmla.bench.compare_chances import MULTI_ROUND
from specmla.bench.compare_run import Contender
from specmla.bench.continuation import ComparedRun
from specmla.verify.stats import AcceptanceStats


@dataclass(frozen=True)
class Case:
    """A drafter under a rule at a temperature; `rule` is its name in the report."""

    contender: Contender
    rule: str
    temperature: float


@dataclass(frozen=True)
class Counted:
    """The continuations of a case that count, over all turns, by prompt.

    Attributes:
        stats: counts.
        reach: by rule, sums by place of the chances of the case's steps under it.
        overlap, weight: sums by place, see `Continuation`.
        continuations, looping: how many there were, and how many of them loop.
    """

    stats: list[AcceptanceStats]
    reach: dict[str, list[list[float]]]
    overlap: list[list[float]]
    weight: list[list[float]]
    continuations: int
    looping: int

    @property
    def steps(self) -> list[float]:
        """Steps by prompt."""
        return [float(s.num_steps) for s in self.stats]

    def expected(self, rule: str) -> list[float]:
        """Tokens by prompt that the steps would emit on average, limits of length aside."""
        reach = self.reach.get(rule, [[] for _ in self.stats])
        return [n + sum(row) for n, row in zip(self.steps, reach, strict=True)]


def count(runs: Sequence[ComparedRun]) -> Counted:
    """Sum the continuations of several runs of a case by prompt.

    Looping ones are left out, unless all loop.
    """
    groups = list(zip(*(run.continuations for run in runs), strict=True))
    looping = sum(c.loops for group in groups for c in group)
    total = sum(map(len, groups))
    kept = [[c for c in group if looping == total or not c.loops] for group in groups]
    stats = [AcceptanceStats() for _ in kept]
    for own, group in zip(stats, kept, strict=True):
        for c in group:
            own.merge(c.stats)
    names = {name for group in kept for c in group for name in c.reach}
    return Counted(
        stats,
        {name: [_sums(c.reach.get(name, []) for c in group) for group in kept] for name in names},
        [_sums(c.overlap for c in group) for group in kept],
        [_sums(c.overlap_weight for c in group) for group in kept],
        total,
        looping,
    )


def quality(case: Case, found: Counted) -> dict[str, Any]:
    """Give what a case yields; intervals are of 95 %, prompts being drawn anew."""
    total, drawn = AcceptanceStats(), resamples(len(found.stats))
    for own in found.stats:
        total.merge(own)
    emitted = [float(s.num_emitted_tokens) for s in found.stats]
    expected = found.expected(case.rule)
    drafting = [float(s.num_spec_steps) for s in found.stats]
    reach = found.reach.get(case.rule, [])
    mean, ends = _by_place(reach, [drafting] * _width(reach), drawn)
    row = total.as_dict() | {
        "tokens_per_step_interval": interval(ratios(emitted, found.steps, drawn)),
        "expected_tokens_per_step": _ratio(expected, found.steps),
        "expected_tokens_per_step_interval": interval(ratios(expected, found.steps, drawn)),
        "expected_acceptance_per_position": mean,
        "expected_acceptance_per_position_interval": ends,
        "continuations": found.continuations,
        "looping": found.looping,
    }
    if not case.contender.tree:
        weights = [_column(found.weight, j) for j in range(_width(found.overlap))]
        row["overlap_per_position"], row["overlap_per_position_interval"] = _by_place(
            found.overlap, weights, drawn
        )
    return row


def speed(pairs: Sequence[tuple[ComparedRun, ComparedRun]]) -> dict[str, Any]:
    """Give the medians over turns of a case's speed, the plain one's and their ratio."""
    own, plain = ([run.tokens_per_s for run in runs] for runs in zip(*pairs, strict=True))
    gains = [a / b for a, b in zip(own, plain, strict=True)]
    return {
        "tokens_per_s": statistics.median(own),
        "plain_tokens_per_s": statistics.median(plain),
        "speedup": statistics.median(gains),
        "speedup_range": [min(gains), max(gains)],
    }


def block_gains(counted: Mapping[Case, Counted]) -> Iterator[dict[str, Any]]:
    """Compare block verification with token-level acceptance on the steps of the latter."""
    for case, found in counted.items():
        if case.rule != "token_level" or not case.temperature:
            continue
        pairs = zip(found.expected("block"), found.expected("token_level"), strict=True)
        gain = [a - b for a, b in pairs]
        drawn = resamples(len(gain))
        yield {
            "what": "block over token_level",
            "drafter": case.contender.name,
            "rule": "block",
            "temperature": case.temperature,
            "gain": _ratio(gain, found.steps),
            "interval": interval(ratios(gain, found.steps, drawn)),
        }


def tree_gains(counted: Mapping[Case, Counted]) -> Iterator[dict[str, Any]]:
    """Compare trees with chains of the same model and depth, prompt by prompt."""
    by_name = {(c.contender.name, c.rule, c.temperature): c for c in counted}
    for case, found in counted.items():
        rule = "token_level" if case.rule == MULTI_ROUND else case.rule
        chain = by_name.get((case.contender.chain or "", rule, case.temperature))
        if chain is None:
            continue
        other, drawn = counted[chain], resamples(len(found.stats))
        tree_part, chain_part = found.expected(case.rule), other.expected(rule)
        differences = _difference((tree_part, found.steps), (chain_part, other.steps), drawn)
        yield {
            "what": "tree over chain",
            "drafter": case.contender.name,
            "rule": case.rule,
            "temperature": case.temperature,
            "gain": _ratio(tree_part, found.steps) - _ratio(chain_part, other.steps),
            "interval": interval(differences),
        }


def _difference(
    one: tuple[list[float], list[float]], other: tuple[list[float], list[float]], drawn: Tensor
) -> Tensor:
    """Resample two ratios with the same prompts; those without steps on a side are left out."""
    sums = [torch.tensor(v, dtype=torch.float64)[drawn].sum(1) for v in (*one, *other)]
    there = (sums[1] > 0) & (sums[3] > 0)
    part, whole, other_part, other_whole = (s[there] for s in sums)
    return part / whole - other_part / other_whole


def _by_place(
    parts: list[list[float]], wholes: list[list[float]], drawn: Tensor
) -> tuple[list[float], list[list[float]]]:
    """Give mean and interval of each place up to the first one without any weight.

    `wholes` are by place, then by prompt.
    """
    columns = [_column(parts, j) for j in range(_width(parts))]
    pairs = list(takewhile(lambda pair: sum(pair[1]) > 0, zip(columns, wholes, strict=True)))
    return [_ratio(a, b) for a, b in pairs], [interval(ratios(a, b, drawn)) for a, b in pairs]


def _width(rows: list[list[float]]) -> int:
    return max(map(len, rows), default=0)


def _column(rows: list[list[float]], place: int) -> list[float]:
    return [row[place] if place < len(row) else 0.0 for row in rows]


def _sums(rows: Iterator[list[float]]) -> list[float]:
    kept = list(rows)
    return [sum(_column(kept, j)) for j in range(_width(kept))]


def _ratio(parts: Sequence[float], wholes: Sequence[float]) -> float:
    return sum(parts) / sum(wholes) if sum(wholes) else 0.0
