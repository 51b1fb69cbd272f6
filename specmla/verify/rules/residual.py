"""Ratio and residual of speculative sampling, for any shape of draft distribution.

Leading axes are free (a chain's [B, K], the nodes of trees), and every function is elementwise in
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.verify.sparse import DraftProbs, SparseProbs


def prob_of(p: Tensor, tokens: Tensor) -> Tensor:
    """Give p [..., W] at tokens [...] as float64; 0 for ids outside the vocabulary."""
    width = p.shape[-1]
    inside = (tokens >= 0) & (tokens < width)
    found = p.gather(-1, tokens.clamp(0, width - 1)[..., None])[..., 0].double()
    return torch.where(inside, found, 0.0)


def ratio(p: Tensor, q: DraftProbs, drafts: Tensor) -> Tensor:
    """Give p(d) / q(d) [...] as float64, without an upper bound; 0 for ids outside the vocabulary.

    A draft of q(d) = 0 cannot have been drawn from q; it gets 0.
    """
    top = prob_of(p, drafts)
    if q is None:
        return top
    below = q.at(drafts).double() if isinstance(q, SparseProbs) else prob_of(q, drafts)
    # Written so that NaN of q stays out where there is no draft.
    inside = (drafts >= 0) & (drafts < p.shape[-1])
    return torch.where(inside & ~(below == 0), top / below, 0.0)


def residual_(out: Tensor, q: DraftProbs, drafts: Tensor) -> Tensor:
    """Make `out` [..., W], which holds p or a multiple of it up to p, max(out - q, 0) in place."""
    width = out.shape[-1]
    if isinstance(q, SparseProbs):
        ids, probs = q.inside(width)
        return out.scatter_add_(-1, ids, -probs.to(out.dtype)).clamp_(min=0.0)
    if q is not None:
        return out.sub_(q).clamp_(min=0.0)
    at = drafts.clamp(0, width - 1)[..., None]
    inside = ((drafts >= 0) & (drafts < width))[..., None]
    kept = out.gather(-1, at).masked_fill_(inside, 0.0)
    return out.scatter_(-1, at, kept)


def fill_empty_(out: Tensor, p: Tensor, empty: Tensor) -> Tensor:
    """Put p [..., W] where `empty` [...], in place.

    A residual is empty only if q covers p, and then (rounding aside) nothing is refused.
    """
    if empty.device.type != "cpu" or empty.any():  # on a GPU, to look would be to wait
        torch.where(empty[..., None], p, out, out=out)
    return out
