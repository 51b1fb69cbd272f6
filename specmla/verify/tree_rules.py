"""Decide which path of a tree stands and which token follows it.

`multi_round` is the rule of chains, `token_level`, tried child after child (SpecInfer, Miao et al.,
arXiv:2305.09781; without replacement: Jeon et al., arXiv:2402.14160, and Yang et al.). At a node
whose row has the distribution p, the first child x1 is accepted with probability
min(1, p(x1) / q1(x1)); where it is refused, p becomes max(p - q1, 0), renormalised, and the second
child is tried against q2, and so on; where all are refused, the token is drawn from what p has
become.

q_j is the distribution from which child j was really drawn, given its elder siblings, and that one
definition covers every way to draw siblings:

- with replacement: all rows are q;
- without replacement: row j is q with the elder siblings' ids at zero, renormalised
  (`sibling_draws.without_replacement`); q is exhausted where nothing is left, its row is then all
  zeros, its child can't have been drawn, is refused and changes nothing;
- deterministic children (the top c, a look-up): one-hot, q = None. A child is accepted with what is
  left of p at it. Two equal siblings are allowed, the younger is never accepted.

A chain in these tables gets the terms of `token_level` bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specmla.verify.accept import Acceptance
from specmla.verify.draw import draw
from specmla.verify.rules.residual import fill_empty_, ratio, residual_
from specmla.verify.rules.terms import RuleTerms, check_terms
from specmla.verify.sparse import DraftProbs, SparseProbs
from specmla.verify.tree import TreeTables


class TreePath(NamedTuple):
    """The accepted path of each request.

    Attributes:
        rows: [B, K] int64, the rows of its nodes from the anchor's child on, then -1.
        num_accepted: [B] int64, its length.
        end: [B] int64, its last row, 0 where nothing was accepted.
    """

    rows: Tensor
    num_accepted: Tensor
    end: Tensor


def multi_round(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Try the children of every node in order.

    Args:
        p: [B, K+1, W] float32 or float64; row r follows the path to row r.
        drafts: [B, K] int64; negative where no draft was made: that child is passed over.
        q: what each node was drawn from given its elder siblings: dense [B, K, W], sparse
            [B, K, C], or None for one-hot.
        tree: of the step.

    Returns:
        accept: [B, K] float64, the chance of a node if the walk has come to its parent and all its
        elder siblings were refused. correction: [B, K+1, W], what to draw from where the walk ends.

    Raises:
        ArgumentError: shapes that do not fit each other.
        ArgumentTypeError: drafts that are not int64.
    """
    check_terms(p, drafts, q)
    b, k = drafts.shape
    flat_accept = torch.zeros(b * k + tree.padded, dtype=torch.float64, device=p.device)
    flat_drafts, left = drafts.reshape(-1), p.clone().flatten(0, 1)
    parents = (tree.parents + torch.arange(b, device=p.device)[:, None] * (k + 1)).view(-1)
    if tree.padded:  # a node that is none hangs on a row that is none
        flat_drafts = torch.nn.functional.pad(flat_drafts, (0, 1), value=-1)
        left = torch.nn.functional.pad(left, (0, 0, 0, 1), value=1.0)
        parents = torch.nn.functional.pad(parents, (0, 1), value=b * (k + 1))
    mass = torch.ones(len(left), dtype=p.dtype, device=p.device)
    start = 0
    for end in tree.rank_ends:
        nodes = tree.order[start:end]
        at, tokens = parents[nodes], flat_drafts[nodes]
        if q is None:
            flat_accept[nodes] = _take_chosen_(left, mass, at, tokens)
        else:
            drawn_from = _of_nodes(q, nodes.clamp(max=b * k - 1))
            flat_accept[nodes] = _take_drawn_(left, mass, at, tokens, drawn_from)
        start = end
    return RuleTerms(flat_accept[: b * k].view(b, k), left[: b * (k + 1)].view(p.shape))


def _take_drawn_(left: Tensor, mass: Tensor, at: Tensor, tokens: Tensor, q: DraftProbs) -> Tensor:
    """Test one drawn child [n] of each of the nodes `at` [n]; give its chance, take q from `left`.

    left: [B * (K+1), W], what is left of p at each node; it sums to `mass` [B * (K+1)].
    """
    now = left[at].div_(mass[at][:, None])
    rest = residual_(now.clone(), q, tokens)
    fill_empty_(rest, now, (tokens < 0) | (rest.sum(-1) == 0))
    left[at], mass[at] = rest, rest.sum(-1)
    return ratio(now, q, tokens).clamp(0.0, 1.0)


def _take_chosen_(left: Tensor, mass: Tensor, at: Tensor, tokens: Tensor) -> Tensor:
    """Do the same with one-hot q: a child takes its own id away and nothing else."""
    width = left.shape[1]
    inside = (tokens >= 0) & (tokens < width)
    cell = at * width + tokens.clamp(0, width - 1)
    flat, before = left.view(-1), mass[at]
    p_child = flat[cell]
    flat[cell] = torch.where(inside, 0.0, p_child)
    rest = left[at].sum(-1)
    gone = inside & (rest > 0)
    flat[cell] = torch.where(gone, 0.0, p_child)
    mass[at] = torch.where(gone, rest, before)
    return torch.where(inside, p_child.double() / before.double(), 0.0).clamp(0.0, 1.0)


def _of_nodes(q: DraftProbs, nodes: Tensor) -> DraftProbs:
    """Pick nodes [n] of distributions [B, K, ...]."""
    if isinstance(q, SparseProbs):
        return SparseProbs(*(part.flatten(0, 1)[nodes] for part in q))
    return None if q is None else q.flatten(0, 1)[nodes]


def decide_tree(
    terms: RuleTerms, drafts: Tensor, tree: TreeTables, accept_u: Tensor, correction_u: Tensor
) -> tuple[Acceptance, TreePath]:
    """Draw the outcome of a step.

    Args:
        terms: from a rule.
        drafts: [B, K] int64, as given to the rule.
        tree: of the step.
        accept_u: [B, K] float64 in (0, 1).
        correction_u: [B] float64 in (0, 1), sharing no number with `accept_u` or the drafting.
    """
    path = walk(accept_u < terms.accept, tree)
    b, rows, width = terms.correction.shape
    first = torch.arange(b, device=drafts.device) * rows
    weights = terms.correction.reshape(b * rows, width).index_select(0, first + path.end)
    drawn = draw(weights, correction_u)
    return _outcome(drafts, tree, path, drawn.token, drawn.flagged)


def follow(target: Tensor, drafts: Tensor, tree: TreeTables) -> tuple[Acceptance, TreePath]:
    """Accept the child that is the target's own token, node after node.

    With greedy tokens this equals `multi_round` with one-hot p, whatever q; with tokens drawn from
    p it is sample-match, which needs no q and keeps p's distribution for any drafts.

    Args:
        target: [B, K+1] int64, the target's token of each row, never -1.
        drafts: [B, K] int64; negative where no draft was made.
        tree: of the step.
    """
    path = walk(drafts == target.gather(1, tree.parents), tree)
    token = target.gather(1, path.end[:, None])[:, 0]
    return _outcome(drafts, tree, path, token, torch.zeros_like(token, dtype=torch.bool))


def walk(stands: Tensor, tree: TreeTables) -> TreePath:
    """Go down from the anchor, at each node to the first child that stands.

    Args:
        stands: [B, K] bool, the outcome of each node's own test; of cells that are no node it may
            be anything.
        tree: of the step.
    """
    k = stands.shape[1]
    stands = stands & (tree.depths > 0)
    row = torch.arange(1, k + 1, device=stands.device)
    is_elder = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (row < row[:, None])
    chosen = stands & ~(is_elder & stands[:, None, :]).any(-1)
    # A node is on the path if it and all its ancestors were chosen; the anchor always is.
    bits = torch.where(chosen, 1 << row, 0).sum(-1) | 1
    on_path = chosen & ((tree.words & ~bits[:, None]) == 0)
    cell = torch.where(on_path, tree.depths, k + 1)
    rows = torch.full((len(stands), k + 2), -1, dtype=torch.int64, device=stands.device)
    rows.scatter_(1, cell, row.expand_as(cell))
    rows[:, 0] = 0
    num_accepted = on_path.sum(-1)
    end = rows.gather(1, num_accepted[:, None])[:, 0]
    return TreePath(rows[:, 1 : k + 1], num_accepted, end)


def num_judged(drafts: Tensor, tree: TreeTables) -> Tensor:
    """Count [B] the nodes that a walk may come to: no draft is missing (-1) on the way to them."""
    row = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    made = (drafts >= 0) & (tree.depths > 0)
    bits = torch.where(made, 1 << row, 0).sum(-1) | 1
    return (made & ((tree.words & ~bits[:, None]) == 0)).sum(-1)


def _outcome(
    drafts: Tensor, tree: TreeTables, path: TreePath, token: Tensor, flagged: Tensor
) -> tuple[Acceptance, TreePath]:
    """Put the path's tokens and the one after them in order."""
    accepted = drafts.gather(1, (path.rows - 1).clamp(min=0))
    accepted = torch.where(path.rows > 0, accepted, -1)
    tokens = torch.nn.functional.pad(accepted, (0, 1), value=-1)
    tokens = tokens.scatter(1, path.num_accepted[:, None], token[:, None])
    return Acceptance(path.num_accepted, token, tokens, flagged), path
