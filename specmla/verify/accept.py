"""Decide which drafts stand and which token follows them.

A rule is a pure function of (p, drafts, q): it says with what probability each draft is accepted
and what to draw from where the run of accepted drafts ends. It never sees a random number, so the
sampler and an exact enumeration use the same function, in float32 or float64.

p is the target's distribution after all its processors; q is the distribution each draft was
really drawn from (one-hot on the draft where nothing was drawn).

`token_level` is speculative sampling (Leviathan, Kalman, Matias, ICML 2023; Chen et al.,
arXiv:2302.01318): accept d with probability min(1, p(d) / q(d)); at the first refusal draw from
max(p - q, 0), renormalised; after the last acceptance draw from p.

Two kinds of drafts are never accepted, and they end the run differently:

- -1 (any negative id) means that no draft was made; the token there comes from p.
- An id of W or more was really drawn, by a drafter with a larger vocabulary: p is 0 there, the
  draft is refused like any other and the token comes from the residual. With p instead, ids that
  q favours would gain: p = (1/2, 1/2), q = (1/2, 0) and 1/2 beyond would emit id 0 with 3/4.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.errors import ArgumentTypeError, require
from specmla.verify.draw import draw


class RuleTerms(NamedTuple):
    """What a rule says before any random number is drawn.

    Attributes:
        accept: [B, K] float64 in [0, 1], the chance of draft j if all before it were accepted.
        correction: [B, K+1, W] not normalised, in the dtype of p. Row j is what to draw from if
            draft j is the first not accepted; row K is for a run of K.
    """

    accept: Tensor
    correction: Tensor


class Rule(Protocol):
    """A pure function from distributions and drafts to acceptance terms."""

    def __call__(self, p: Tensor, drafts: Tensor, q: Tensor | None) -> RuleTerms:
        """Give the terms of p [B, K+1, W], drafts [B, K] int64 and q [B, K, W] or None."""
        ...


class Acceptance(NamedTuple):
    """What one step decides for B requests.

    Attributes:
        num_accepted: [B] int64 in 0 .. K; the request emits one token more.
        next_token: [B] int64, the token after the accepted drafts.
        tokens: [B, K+1] int64, the accepted drafts, then `next_token`, then -1.
        flagged: [B] bool, there was nothing to draw the next token from; it must not be used.
    """

    num_accepted: Tensor
    next_token: Tensor
    tokens: Tensor
    flagged: Tensor


def token_level(p: Tensor, drafts: Tensor, q: Tensor | None = None) -> RuleTerms:
    """Apply the ratio test and the residual of speculative sampling to each draft alone.

    Where the residual is empty the correction is p: it is empty only if q covers p, and then
    (rounding aside) no draft is refused. A draft of q(d) = 0 cannot have been drawn from q; it is
    refused.

    Args:
        p: [B, K+1, W] float32 or float64; row j follows the anchor and j drafts.
        drafts: [B, K] int64; negative where no draft was made.
        q: [B, K, W], what each draft was drawn from, or None: one-hot on the draft. Rows without
            a draft may hold anything.

    Raises:
        ArgumentError: shapes that do not fit each other.
        ArgumentTypeError: drafts that are not int64.
    """
    _check_terms(p, drafts, q)
    k, width = drafts.shape[1], p.shape[2]
    inside = (drafts >= 0) & (drafts < width)
    at = drafts.clamp(0, width - 1)[..., None]
    p_draft = p[:, :k].gather(2, at)[..., 0].double()
    if q is None:
        chance, correction = p_draft, p.clone()
        residual = correction[:, :k]
        residual.scatter_(2, at, torch.where(inside, 0.0, p_draft)[..., None].to(p.dtype))
    else:
        q_draft = q.gather(2, at)[..., 0].double()
        chance, correction = torch.where(q_draft > 0, p_draft / q_draft, 0.0), torch.empty_like(p)
        correction[:, k:] = p[:, k:]
        residual = correction[:, :k]
        torch.sub(p[:, :k], q, out=residual).clamp_(min=0.0)
    empty = (drafts < 0) | (residual.sum(-1) == 0)
    if empty.device.type != "cpu" or empty.any():  # on a GPU, to look would be to wait
        torch.where(empty[..., None], p[:, :k], residual, out=residual)
    return RuleTerms(torch.where(inside, chance.clamp(0.0, 1.0), 0.0), correction)


RULES: Mapping[str, Rule] = MappingProxyType({"token_level": token_level})


def decide(terms: RuleTerms, drafts: Tensor, accept_u: Tensor, correction_u: Tensor) -> Acceptance:
    """Draw the outcome of a step.

    Draft j stands if it and all before it have u < accept; a chance of 0 never stands, a chance
    of 1 always does.

    Args:
        terms: from a rule.
        drafts: [B, K] int64, as given to the rule.
        accept_u: [B, K] float64 in (0, 1).
        correction_u: [B] float64 in (0, 1), sharing no number with `accept_u` or the drafting.
    """
    num_accepted = _run_length(accept_u < terms.accept)
    b, rows, width = terms.correction.shape
    first = torch.arange(b, device=drafts.device) * rows
    weights = terms.correction.reshape(b * rows, width).index_select(0, first + num_accepted)
    drawn = draw(weights, correction_u)
    tokens = _emitted(drafts, num_accepted, drawn.token)
    return Acceptance(num_accepted, drawn.token, tokens, drawn.flagged)


def greedy(target: Tensor, drafts: Tensor) -> Acceptance:
    """Accept drafts while they are the target's own greedy tokens.

    Equal to `token_level` with one-hot p, whatever q, without building any probabilities.

    Args:
        target: [B, K+1] int64, the greedy token of each row (`row_top(logits).token`), never -1.
        drafts: [B, K] int64; negative where no draft was made.

    Raises:
        ArgumentError: shapes that do not fit each other.
    """
    b, k = drafts.shape
    require(
        [f"target has shape {tuple(target.shape)}, accepted is {(b, k + 1)}"]
        if target.shape != (b, k + 1)
        else [],
        "greedy",
    )
    num_accepted = _run_length(drafts == target[:, :k])
    next_token = target.gather(1, num_accepted[:, None])[:, 0]
    flagged = torch.zeros_like(next_token, dtype=torch.bool)
    tokens = _emitted(drafts, num_accepted, next_token)
    return Acceptance(num_accepted, next_token, tokens, flagged)


def _run_length(stands: Tensor) -> Tensor:
    """Count the leading trues of each row [B, K]."""
    return stands.long().cumprod(1).sum(1)


def _emitted(drafts: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    end = num_accepted[:, None]
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    after = torch.where(place == end, next_token[:, None], -1)
    return torch.where(place < end, padded, after)


def _check_terms(p: Tensor, drafts: Tensor, q: Tensor | None) -> None:
    if drafts.dtype != torch.int64:
        raise ArgumentTypeError(f"drafts has dtype {drafts.dtype}, accepted is torch.int64")
    found = []
    if p.dim() != 3 or drafts.dim() != 2 or p.shape[:2] != (drafts.shape[0], drafts.shape[1] + 1):
        found.append(
            f"p has shape {tuple(p.shape)}, drafts {tuple(drafts.shape)}; accepted are "
            "[B, K+1, W] and [B, K]"
        )
    elif q is not None and q.shape != (*drafts.shape, p.shape[2]):
        found.append(
            f"q has shape {tuple(q.shape)}, accepted is {(*drafts.shape, p.shape[2])}; a draft "
            "vocabulary of another size is padded by pad_vocab"
        )
    require(found, "rule")
