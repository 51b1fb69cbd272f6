"""Block verification: all drafts of a block are judged together."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.verify.rules.residual import fill_empty_, ratio, residual_
from specmla.verify.rules.terms import Ending, RuleTerms, check_terms, num_drafts
from specmla.verify.sparse import DraftProbs


def block(p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
    """Accept the longest prefix whose own test passes; never fewer drafts than `token_level`.

    With P_0 = 1 and P_i = min(1, P_{i-1} p(d_i) / q(d_i)), the prefix of i < k drafts passes with
    S_i / (S_i + 1 - P_i), where S_i is the mass of max(P_i p - q, 0) at the next place (1 for 0/0:
    q equals p there), and the whole block with P_k. After i drafts the token is drawn from
    max(P_i p - q, 0), after all of them from p. Sun et al. (arXiv:2403.10444), algorithm 2.

    Its random numbers must be new in each block: a place that is drawn again in the next one must
    not meet the number that has already decided about it.

    Arguments and errors are those of `Rule`.
    """
    check_terms(p, drafts, q)
    b, k = drafts.shape
    reach = _reach(ratio(p[:, :k], q, drafts))
    correction = p.clone()
    rest = correction[:, :k].mul_(reach[:, :k, None].to(p.dtype))
    mass = residual_(rest, q, drafts).sum(-1, dtype=torch.float64)
    count = num_drafts(drafts)[:, None]
    place = torch.arange(k, device=p.device)
    fill_empty_(rest, p[:, :k], (place >= count) | (mass == 0))
    # The chance of the prefix that ends before place i is known from place i: one column later.
    both = mass + 1.0 - reach[:, :k]
    inner = torch.where(both > 0, mass / both, 1.0)
    inner = torch.cat([inner[:, 1:], inner.new_zeros(b, min(k, 1))], dim=1)
    passes = torch.where(place + 1 < count, inner, reach[:, 1:])
    usable = (place < count) & (reach[:, 1:] > 0)
    return RuleTerms(torch.where(usable, passes, 0.0), correction, Ending.LAST_PASS)


def _reach(ratios: Tensor) -> Tensor:
    """Give P_0 .. P_K [B, K+1] of ratios [B, K]; 0 stays 0, whatever follows."""
    reach = [ratios.new_ones(len(ratios))]
    for j in range(ratios.shape[1]):
        last = reach[-1]
        reach.append(torch.where(last > 0, (last * ratios[:, j]).clamp(0.0, 1.0), 0.0))
    return torch.stack(reach, dim=1)
