"""Counts every path of two consecutive chain blocks on small vocabularies.

Target and drafter are tables indexed by the whole history. A block drafts K tokens from its anchor,
verifies them, emits 1 to K+1, and the next block drafts anew from what was emitted. The chance of
every output is summed over all drafts and all outcomes with the terms of the very rule that the
sampler uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.verify.rules.terms import Ending, Rule, RuleTerms
from specmla.verify.sparse import DraftProbs, SparseProbs
from specmla.verify.vocab import pad_vocab


class Model(NamedTuple):
    """Next-token distributions: `tables[n]` is [W**n, W], a row per history of length n."""

    tables: list[Tensor]
    width: int


class Drafts(NamedTuple):
    """All P things a drafter may do after each of R histories."""

    tokens: Tensor  # [R, P, K]
    weight: Tensor  # [R, P]
    q: DraftProbs  # [R, P, K, W of the drafter] or [R, P, K, C], as reported


Drafter = Callable[[int, int], Drafts]  # (history length, W of the target) -> all drafts


class Case(NamedTuple):
    target: Model
    drafter: Drafter
    k: int


def rows_along(model: Model, n: int, tokens: Tensor, num_rows: int) -> Tensor:
    """Give the distributions [R, P, num_rows, W] that follow histories and 0, 1, ... tokens.

    Rows after a token that the model does not know hold NaN: nothing may depend on them.
    """
    r, p = tokens.shape[:2]
    history = torch.arange(r)[:, None].expand(r, p)
    known = torch.ones(r, p, dtype=torch.bool)
    rows = []
    for j in range(num_rows):
        row = model.tables[n + j][history]
        rows.append(torch.where(known[..., None], row, torch.nan))
        if j < tokens.shape[2]:
            known = known & (tokens[..., j] >= 0) & (tokens[..., j] < model.width)
            history = history * model.width + tokens[..., j].clamp(0, model.width - 1)
    return torch.stack(rows, dim=2)


def fitted(q: DraftProbs, rows: int, width: int) -> DraftProbs:
    """Bring q [R, P, K, ...] to the shape and vocabulary that a rule takes."""
    if isinstance(q, SparseProbs):
        return SparseProbs(q.ids.flatten(0, 1), q.probs.flatten(0, 1))
    if q is None:
        return None
    return pad_vocab(q.flatten(0, 1), width, allow_mismatch=True)


def rule_terms(case: Case, rule: Rule, n: int) -> tuple[Drafts, RuleTerms]:
    """Ask the rule about every draft after every history of length n; terms are [R, P, ...]."""
    drafts = case.drafter(n, case.target.width)
    r, paths = drafts.weight.shape
    p = rows_along(case.target, n, drafts.tokens, case.k + 1).flatten(0, 1)
    terms = rule(p, drafts.tokens.flatten(0, 1), fitted(drafts.q, r * paths, case.target.width))
    accept = terms.accept.view(r, paths, case.k)
    return drafts, terms._replace(
        accept=accept, correction=terms.correction.unflatten(0, (r, paths))
    )


def stops(terms: RuleTerms) -> Tensor:
    """Give the chance [R, P, K+1] that just so many drafts pass their tests."""
    accept = terms.accept
    k, one = accept.shape[-1], torch.ones_like(accept[..., :1])
    refuse = 1 - accept
    if terms.ending is Ending.LAST_PASS:  # the last pass is at place j, so all later ones fail
        later = [refuse[..., j:].prod(-1) for j in range(k)] + [one[..., 0]]
        return torch.cat([one, accept], dim=-1) * torch.stack(later, dim=-1)
    before = [accept[..., :j].prod(-1) for j in range(k + 1)]
    return torch.stack(before, dim=-1) * torch.cat([refuse, one], dim=-1)


def next_tokens(terms: RuleTerms, drafts: Tensor) -> Tensor:
    """Give the chance [R, P, K+1, W] of each next token where so many drafts stand."""
    rows = terms.correction
    if terms.ending is Ending.MATCH:  # the token drawn there is none that the draft would equal
        place = drafts.clamp(0, rows.shape[-1] - 1)[..., None]
        inside = ((drafts >= 0) & (drafts < rows.shape[-1]))[..., None]
        kept = rows[..., :-1, :].gather(-1, place).masked_fill(inside, 0.0)
        rows = torch.cat([rows[..., :-1, :].scatter(-1, place, kept), rows[..., -1:, :]], dim=-2)
    return rows / rows.sum(-1, keepdim=True)


def block(case: Case, rule: Rule, n: int) -> list[Tensor]:
    """Give the chance [W**n, W**m] of emitting each m = 1 .. K+1 tokens after each history."""
    width = case.target.width
    drafts, terms = rule_terms(case, rule, n)
    r, paths = drafts.weight.shape
    chance = drafts.weight[..., None] * stops(terms)
    token = next_tokens(terms, drafts.tokens)
    prefix, out = torch.zeros(r, paths, dtype=torch.int64), []
    for j in range(case.k + 1):
        reached = chance[..., j, None] > 0  # rows out of reach may hold anything
        mass = torch.where(reached, chance[..., j, None] * token[..., j, :], 0.0)
        emitted = torch.zeros(r, width**j, width, dtype=torch.float64)
        emitted.scatter_add_(1, prefix[..., None].expand(-1, -1, width), mass)
        out.append(emitted.reshape(r, -1))
        if j < case.k:
            prefix = prefix * width + drafts.tokens[..., j].clamp(0, width - 1)
    return out


def mean_accepted(case: Case, rule: Rule) -> float:
    """Give the expected number of drafts that the first block accepts."""
    return sum(j * out.sum().item() for j, out in enumerate(block(case, rule, 0)))


def continued(model: Model, chance: Tensor, length: int, total: int) -> Tensor:
    """Let the target itself finish outputs [W**length] up to `total` tokens."""
    for n in range(length, total):
        chance = (chance[:, None] * model.tables[n]).flatten()
    return chance


def total_variation(case: Case, rule: Rule) -> float:
    """Compare the output of two consecutive blocks with the target's own."""
    total = 2 * (case.k + 1)
    got = torch.zeros(case.target.width**total, dtype=torch.float64)
    for m1, first in enumerate(block(case, rule, 0), start=1):
        for m2, second in enumerate(block(case, rule, m1), start=1):
            got += continued(case.target, (first[0][:, None] * second).flatten(), m1 + m2, total)
    want = continued(case.target, torch.ones(1, dtype=torch.float64), 0, total)
    assert abs(want.sum().item() - 1) < 1e-12
    return 0.5 * (got - want).abs().sum().item()
