"""Relaxed acceptance, a lossy rule: the output does not have the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specmla.errors import require
from specmla.verify.rules.residual import prob_of
from specmla.verify.rules.terms import RuleTerms, check_terms
from specmla.verify.sparse import DraftProbs


@dataclass(frozen=True)
class LossyRelaxed:
    """Accept d if it is one of the `top_n` likeliest and p(d) >= max p - delta; else draw from p.

    LOSSY. The relaxed acceptance that TensorRT-LLM offers for the thinking phase of DeepSeek-R1.
    It acts on p after all processors: at temperature 0 nothing is left to relax and the rule equals
    the greedy one.

    Attributes:
        top_n: ids that may stand, 1 or more; equal probabilities share a rank.
        delta: how far below the likeliest id they may be, in 0 .. 1.
    """

    top_n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        """Check both limits."""
        found = []
        if not isinstance(self.top_n, int) or self.top_n < 1:
            found.append(f"top_n is {self.top_n!r}, accepted are integers of 1 or more")
        if not 0 <= self.delta <= 1:
            found.append(f"delta is {self.delta}, accepted are 0 to 1")
        require(found, "LossyRelaxed")

    def __call__(self, p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        """Give the terms; q is not used."""
        check_terms(p, drafts, q)
        rows = p[:, : drafts.shape[1]]
        chance = prob_of(rows, drafts)
        better = (rows.double() > chance[..., None]).sum(-1)
        near = chance >= rows.amax(-1).double() - self.delta
        return RuleTerms(((better < self.top_n) & near & (chance > 0)).double(), p)
