"""Typical acceptance, a lossy rule: the output does not have the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.errors import require
from specmla.verify.rules.residual import prob_of
from specmla.verify.rules.terms import RuleTerms, check_terms
from specmla.verify.sparse import DraftProbs


@dataclass(frozen=True)
class LossyTypical:
    """Accept d if p(d) > min(epsilon, delta * exp(-H(p))); else draw from p. LOSSY.

    Cai et al., Medusa (arXiv:2401.10774). The rule of that paper that the first token of a step is
    greedy is left out: a step here always emits the token after the drafts. At temperature 0 the
    rule equals the greedy one.

    Attributes:
        epsilon: threshold of peaked rows, in 0 .. 1.
        delta: threshold of flat rows, relative to exp(-entropy), 0 or more.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        """Check both thresholds."""
        found = []
        if not 0 <= self.epsilon <= 1:
            found.append(f"epsilon is {self.epsilon}, accepted are 0 to 1")
        if not 0 <= self.delta < float("inf"):
            found.append(f"delta is {self.delta}, accepted are finite values of 0 or more")
        require(found, "LossyTypical")

    def __call__(self, p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        """Give the terms; q is not used."""
        check_terms(p, drafts, q)
        rows = p[:, : drafts.shape[1]].double()
        entropy = torch.special.entr(rows).sum(-1)
        bound = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        return RuleTerms((prob_of(rows, drafts) > bound).double(), p)
