"""What a drafter's run gave for one prompt, and for all: tokens, counts, chances, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specmla.bench.compare_chances import GREEDY, StepChances
from specmla.verify.diversity import distinct_ngram_ratio
from specmla.verify.stats import AcceptanceStats

LOOPING = 0.5
"""A continuation with fewer distinct 4-grams than this share loops."""


@dataclass
class Continuation:
    """One prompt's.

    Attributes:
        tokens: new ones.
        stats: counts over its verify steps.
        reach: by rule, sums over steps of the chance that each place is accepted.
        overlap, overlap_weight: sums over steps of sum min(p, q) of each place times the chance
            that token-level acceptance comes to it, and of that chance.
    """

    tokens: list[int] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    reach: dict[str, list[float]] = field(default_factory=dict)
    overlap: list[float] = field(default_factory=list)
    overlap_weight: list[float] = field(default_factory=list)

    @property
    def loops(self) -> bool:
        """Whether it repeats itself: that flatters every drafter."""
        return distinct_ngram_ratio(self.tokens) < LOOPING

    def add(self, chances: StepChances, place: int) -> None:
        """Add the chances of one step, in which this is request `place`."""
        for rule, rows in chances.reach.items():
            _add(self.reach.setdefault(rule, []), rows[place])
        base = chances.reach.get("token_level") or chances.reach.get(GREEDY)
        if base is not None and chances.overlap[place]:
            before = [1.0, *base[place][:-1]]
            _add(self.overlap_weight, before)
            pairs = zip(before, chances.overlap[place], strict=True)
            _add(self.overlap, [weight * part for weight, part in pairs])


@dataclass
class ComparedRun:
    """What one run gave: by prompt, and the seconds of decoding (chances not counted)."""

    continuations: list[Continuation]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of wall time, prompts included."""
        return sum(len(c.tokens) for c in self.continuations) / self.seconds


def _add(sums: list[float], more: Sequence[float]) -> None:
    sums.extend([0.0] * (len(more) - len(sums)))
    for place, value in enumerate(more):
        sums[place] += value
