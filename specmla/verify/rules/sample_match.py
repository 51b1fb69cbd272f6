"""Sample-match: the target draws its own token at every place, drafts stand while they equal it."""

from __future__ import annotations

from torch import Tensor

from specmla.verify.rules.residual import prob_of
from specmla.verify.rules.terms import Ending, RuleTerms, check_terms
from specmla.verify.sparse import DraftProbs


def sample_match(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
    """Accept drafts while they equal the target's own draws; every token emitted is such a draw.

    q is not needed and not used. Fewer drafts are accepted than by `token_level` where they were
    drawn, p(d) instead of min(1, p(d) / q(d)); where nothing was drawn the chances are equal. With
    numbers keyed by position the output depends on the seed alone, not on drafter or K.

    Arguments and errors are those of `Rule`.
    """
    check_terms(p, drafts, q)
    chance = prob_of(p[:, : drafts.shape[1]], drafts).clamp(0.0, 1.0)
    return RuleTerms(chance, p, Ending.MATCH)
