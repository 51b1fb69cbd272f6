"""Judge a step with trees: each request by the tree form of the step's rule.

A chain in such a step gets the tokens that it would get without trees beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specmla.verify.accept import Acceptance, decide
from specmla.verify.draw import draw
from specmla.verify.rules.block import block
from specmla.verify.rules.sample_match import sample_match
from specmla.verify.rules.terms import Rule, check_terms
from specmla.verify.rules.token_level import token_level
from specmla.verify.sparse import DraftProbs
from specmla.verify.streams import Stream, step_uniforms, target_uniforms, uniforms
from specmla.verify.tree import TreeTables
from specmla.verify.tree_rules import TreePath, decide_tree, follow, multi_round

TREE_RULES: tuple[Rule, ...] = (token_level, block, sample_match)
"""Chain rules that have a tree form: `multi_round` of the first two, `follow` of the last."""


def tree_rule_problems(rule: Rule) -> list[str]:
    """List why a step with this rule takes no trees."""
    if rule in TREE_RULES:
        return []
    names = [getattr(known, "__name__", repr(known)) for known in TREE_RULES]
    return [f"the proposal holds trees, rule is {rule!r}; accepted with trees are {names}"]


class TreeStep(NamedTuple):
    """What there is to decide for B requests.

    Attributes:
        tree: of the step.
        p: [B, K+1, W], row r of a request follows the path to its row r.
        drafts: [B, K] int64.
        q: what each node was drawn from, see `multi_round`.
    """

    tree: TreeTables
    p: Tensor
    drafts: Tensor
    q: DraftProbs


def decide_trees(
    rule: Rule, step: TreeStep, seeds: Tensor, positions: Tensor
) -> tuple[Acceptance, TreePath]:
    """Decide which paths stand.

    Args:
        rule: one of `TREE_RULES`.
        step: of B requests.
        seeds: [B] int64.
        positions: [B] int64, of the anchors.
    """
    tree, p, drafts, q = step
    if rule is sample_match:
        return _follow_draws(step, seeds, positions)
    # The number of a node is that of (row of its parent, rank): a chain meets those of chains.
    accept_u = uniforms(seeds, positions, tree.parents, Stream.ACCEPT, tree.ranks)
    numbers = step_uniforms(seeds, positions, drafts.shape[1])
    terms = multi_round(p, drafts, q, tree)
    acceptance, path = decide_tree(terms, drafts, tree, accept_u, numbers.correction)
    if rule is token_level or all(tree.is_tree):
        return acceptance, path
    chains = decide(rule(p, drafts, q), drafts, numbers.accept, numbers.correction)
    return chains_from(chains, acceptance, path, tree)


def _follow_draws(step: TreeStep, seeds: Tensor, positions: Tensor) -> tuple[Acceptance, TreePath]:
    """Draw the target's token of each row by the number of its position, and follow these.

    Rows of one depth share a number: only one of them is on the path.
    """
    check_terms(step.p, step.drafts, step.q)
    b, rows, width = step.p.shape
    depths = torch.nn.functional.pad(step.tree.depths, (1, 0))
    u = target_uniforms(seeds, positions, rows).gather(1, depths)
    drawn = draw(step.p.reshape(b * rows, width), u.reshape(-1))
    acceptance, path = follow(drawn.token.view(b, rows), step.drafts, step.tree)
    flagged = drawn.flagged.view(b, rows).gather(1, path.end[:, None])[:, 0]
    return acceptance._replace(flagged=flagged), path


def chains_from(
    chains: Acceptance, trees: Acceptance, path: TreePath, tree: TreeTables
) -> tuple[Acceptance, TreePath]:
    """Take requests whose tree is none from `chains`."""
    row = torch.arange(1, path.rows.shape[1] + 1, device=path.rows.device)
    is_tree = ((tree.parents + 1 != row) & (tree.depths > 0)).any(1)
    merged = Acceptance(
        *(
            torch.where(is_tree.view(-1, *[1] * (one.dim() - 1)), one, other)
            for one, other in zip(trees, chains, strict=True)
        )
    )
    straight = torch.where(row <= merged.num_accepted[:, None], row, -1)
    rows = torch.where(is_tree[:, None], path.rows, straight)
    end = torch.where(is_tree, path.end, merged.num_accepted)
    return merged, TreePath(rows, merged.num_accepted, end)
