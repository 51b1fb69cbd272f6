"""What the drafts of a step would yield: the coins of acceptance are integrated out.

Whether a draft is accepted is a coin whose chance the rule states; its expectation, given the
drafts, is that chance. Averages of chances have the mean of averages of outcomes and less variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.verify.accept import RULES
from specmla.verify.plan import StepPlan, rows_of_requests
from specmla.verify.rules.residual import prob_of
from specmla.verify.rules.terms import Ending, RuleTerms, num_drafts
from specmla.verify.sampling import processed_probs
from specmla.verify.sparse import DraftProbs, SparseProbs
from specmla.verify.tree import TreeTables
from specmla.verify.tree_rules import multi_round

GREEDY, MULTI_ROUND = "greedy", "multi_round"


class StepChances(NamedTuple):
    """Chances of B requests, by place (in a tree: by depth), as far as each has drafts.

    Attributes:
        reach: by rule, for each request the chances that places 1, 2, ... are accepted.
        overlap: for each request sum min(p, q) of each place; empty for trees.
    """

    reach: dict[str, list[list[float]]]
    overlap: list[list[float]]


def step_chances(plan: StepPlan, logits: Tensor, rules: Sequence[str]) -> StepChances:
    """Give the chances of a planned step.

    Args:
        plan: of requests of one kind, greedy or sampled, without processors.
        logits: [R, W].
        rules: names of chain rules; in a step with trees `multi_round` and `sample_match`. Of
            greedy requests `greedy`.
    """
    p = processed_probs(rows_of_requests(plan, logits), plan.sampling).probs
    # A greedy request's drafts are compared with the target's choice, whatever they came from.
    q = None if plan.sampling.all_greedy else plan.draft_probs
    if plan.tree is not None:
        return StepChances({r: _tree_reach(p, plan, q, r) for r in rules}, [[] for _ in p])
    counts = num_drafts(plan.drafts).tolist()
    reach = {name: _cut(_chain_reach(p, plan.drafts, q, name), counts) for name in rules}
    return StepChances(reach, _cut(overlap(p[:, :-1], q, plan.drafts), counts))


def overlap(p: Tensor, q: DraftProbs, drafts: Tensor) -> Tensor:
    """Give sum over ids of min(p, q) for each draft: the chance that a draw from q is accepted.

    Args:
        p: [B, K, W].
        q: dense [B, K, W], sparse [B, K, C], or None: one-hot on the draft.
        drafts: [B, K] int64.
    """
    if q is None:
        return prob_of(p, drafts)
    if isinstance(q, SparseProbs):
        ids, probs = q.inside(p.shape[-1])
        return torch.minimum(p.gather(-1, ids), probs.to(p.dtype)).sum(-1)
    return torch.minimum(p, q.to(p.dtype)).sum(-1)


def reach_of(terms: RuleTerms) -> Tensor:
    """Give the chances [B, K] that 1, 2, ... drafts or more stand, by a chain's terms."""
    if terms.ending is Ending.LAST_PASS:
        none_from = (1 - terms.accept).flip(1).cumprod(1).flip(1)
        return 1 - none_from
    return terms.accept.cumprod(1)


def _chain_reach(p: Tensor, drafts: Tensor, q: DraftProbs, rule: str) -> Tensor:
    name = "token_level" if rule in (GREEDY, MULTI_ROUND) else rule
    return reach_of(RULES[name](p, drafts, q))


def _cut(values: Tensor, counts: list[int]) -> list[list[float]]:
    return [row[:count] for row, count in zip(values.tolist(), counts, strict=True)]


def _tree_reach(p: Tensor, plan: StepPlan, q: DraftProbs, rule: str) -> list[list[float]]:
    """Sum the chances of the nodes of each depth: at most one of them is on the path.

    A target that draws its own token follows a child with the chance that it had if nothing had
    been drawn.
    """
    assert plan.tree is not None
    terms = multi_round(p, plan.drafts, q if rule == MULTI_ROUND else None, plan.tree)
    return depth_reach(terms.accept, plan.tree)


def depth_reach(accept: Tensor, tree: TreeTables) -> list[list[float]]:
    """Give for each request the chances that the path is 1, 2, ... deep or deeper.

    Args:
        accept: [B, K], of `multi_round`: of a node if its parent is reached and its elder siblings
            were refused.
        tree: of the step.
    """
    found = []
    rows = zip(accept.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True)
    for chances, parents, depths in rows:
        nodes = sorted((depth, i) for i, depth in enumerate(depths) if depth)
        reached, left = {0: 1.0}, dict[int, float]()
        by_depth = [0.0] * max(depths, default=0)
        for depth, i in nodes:
            here = left.get(parents[i], reached[parents[i]])
            reached[i + 1] = here * chances[i]
            left[parents[i]] = here * (1 - chances[i])
            by_depth[depth - 1] += reached[i + 1]
        found.append(by_depth)
    return found
