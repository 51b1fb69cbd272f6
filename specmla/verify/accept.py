"""Decide which drafts stand and which token follows them.

The rules (`specmla.verify.rules`) say with what probability a draft passes and what to draw from
where the run of accepted drafts ends; here random numbers meet their terms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import require
from specmla.verify.draw import draw
from specmla.verify.rules.registry import LOSSLESS, RULES, find_rule, rule_problems
from specmla.verify.rules.terms import Ending, Rule, RuleTerms
from specmla.verify.rules.token_level import token_level
from specmla.verify.streams import StepUniforms, step_uniforms, target_uniforms

__all__ = [
    "LOSSLESS",
    "RULES",
    "Acceptance",
    "Rule",
    "RuleTerms",
    "decide",
    "find_rule",
    "greedy",
    "rule_problems",
    "step_numbers",
    "token_level",
]


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


def decide(terms: RuleTerms, drafts: Tensor, accept_u: Tensor, correction_u: Tensor) -> Acceptance:
    """Draw the outcome of a step.

    Draft j passes if u < accept: a chance of 0 never passes, a chance of 1 always does. An id that
    is negative or W or more, and what follows it, never stands. How many drafts stand then is the
    terms' `ending`.

    Args:
        terms: from a rule.
        drafts: [B, K] int64, as given to the rule.
        accept_u: [B, K] float64 in (0, 1); not used by `Ending.MATCH`.
        correction_u: [B] float64 in (0, 1), sharing no number with `accept_u` or the drafting.
            `Ending.MATCH`: [B, K+1], one a row.

    Raises:
        ArgumentError: numbers of another shape.
    """
    _check_numbers(terms, drafts, accept_u, correction_u)
    if terms.ending is Ending.MATCH:
        return _match(terms.correction, drafts, correction_u)
    b, rows, width = terms.correction.shape
    # Whatever a rule says of them: no draft was made, or none that the target knows.
    usable = (drafts >= 0) & (drafts < width)
    passes = usable & (accept_u < terms.accept)
    if terms.ending is Ending.LAST_PASS:
        num_accepted = _last_pass(passes & usable.long().cumprod(1).bool())
    else:
        num_accepted = _run_length(passes)
    first = torch.arange(b, device=drafts.device) * rows
    weights = terms.correction.reshape(b * rows, width).index_select(0, first + num_accepted)
    drawn = draw(weights, correction_u)
    tokens = _emitted(drafts, num_accepted, drawn.token)
    return Acceptance(num_accepted, drawn.token, tokens, drawn.flagged)


def step_numbers(ending: Ending, seed: Tensor, position: Tensor, num_drafts: int) -> StepUniforms:
    """Give the numbers that `decide` takes for terms of that ending.

    Args:
        ending: of the terms.
        seed: [B] int64.
        position: [B] int64, the index of the anchor in its sequence.
        num_drafts: K.
    """
    if ending is Ending.MATCH:
        drawn = target_uniforms(seed, position, num_drafts + 1)
        return StepUniforms(drawn[:, :0], drawn)
    return step_uniforms(seed, position, num_drafts)


def _match(p: Tensor, drafts: Tensor, u: Tensor) -> Acceptance:
    """Draw a token from each row [B, K+1, W] and keep the drafts that lead with the same ones."""
    drawn = draw(p.flatten(0, 1), u.flatten())
    token, flagged = drawn.token.view_as(u), drawn.flagged.view_as(u)
    num_accepted = _run_length(drafts == token[:, :-1])
    at = num_accepted[:, None]
    next_token = token.gather(1, at)[:, 0]
    tokens = _emitted(drafts, num_accepted, next_token)
    return Acceptance(num_accepted, next_token, tokens, flagged.gather(1, at)[:, 0])


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
    found = []
    if target.shape != (b, k + 1):
        found.append(f"target has shape {tuple(target.shape)}, accepted is {(b, k + 1)}")
    require(found, "greedy")
    num_accepted = _run_length(drafts == target[:, :k])
    next_token = target.gather(1, num_accepted[:, None])[:, 0]
    flagged = torch.zeros_like(next_token, dtype=torch.bool)
    tokens = _emitted(drafts, num_accepted, next_token)
    return Acceptance(num_accepted, next_token, tokens, flagged)


def _run_length(stands: Tensor) -> Tensor:
    """Count the leading trues of each row [B, K]."""
    return stands.long().cumprod(1).sum(1)


def _last_pass(passes: Tensor) -> Tensor:
    """Give the 1-based place of the last true of each row [B, K], 0 where there is none."""
    place = torch.arange(1, passes.shape[1] + 1, device=passes.device)
    return torch.nn.functional.pad(passes * place, (1, 0)).amax(1)


def _emitted(drafts: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    end = num_accepted[:, None]
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    after = torch.where(place == end, next_token[:, None], -1)
    return torch.where(place < end, padded, after)


def _check_numbers(
    terms: RuleTerms, drafts: Tensor, accept_u: Tensor, correction_u: Tensor
) -> None:
    b, k = drafts.shape
    match, found = terms.ending is Ending.MATCH, []
    if not match and accept_u.shape != drafts.shape:
        found.append(f"accept_u has shape {tuple(accept_u.shape)}, accepted is {(b, k)}")
    want = (b, k + 1) if match else (b,)
    if correction_u.shape != want:
        found.append(f"correction_u has shape {tuple(correction_u.shape)}, accepted is {want}")
    require(found, "decide")
