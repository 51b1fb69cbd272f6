"""Speculative sampling: each draft is judged alone."""

from __future__ import annotations

from torch import Tensor

from specmla.verify.rules.residual import fill_empty_, ratio, residual_
from specmla.verify.rules.terms import RuleTerms, check_terms
from specmla.verify.sparse import DraftProbs


def token_level(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
    """Accept d with probability min(1, p(d) / q(d)), else draw from max(p - q, 0), renormalised.

    After the last acceptance the token is drawn from p. Where the residual is empty the correction
    is p. Leviathan, Kalman, Matias (ICML 2023); Chen et al. (arXiv:2302.01318).

    Arguments and errors are those of `Rule`.
    """
    check_terms(p, drafts, q)
    k = drafts.shape[1]
    correction = p.clone()
    rest = residual_(correction[:, :k], q, drafts)
    fill_empty_(rest, p[:, :k], (drafts < 0) | (rest.sum(-1) == 0))
    return RuleTerms(ratio(p[:, :k], q, drafts).clamp(0.0, 1.0), correction)
