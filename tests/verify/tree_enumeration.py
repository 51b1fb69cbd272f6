"""Counts every path of two consecutive tree blocks on small vocabularies.

Target and drafter are tables indexed by the whole history. A block drafts the nodes of a fixed
shape, walks it and emits 1 to depth + 1 tokens; the next block drafts anew from what was emitted.
The chance of every output is summed over all drafts and all outcomes, with the terms of the very
rule that the sampler uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.staging import send_arrays
from specmla.verify.rules.terms import RuleTerms
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs
from specmla.verify.sparse import DraftProbs
from specmla.verify.tree import TreeTables, keep_nodes, node_parents, tree_arrays, tree_tables
from specmla.verify.tree import tree_shape as measure
from specmla.verify.tree_rules import follow

TreeRuleFn = Callable[[Tensor, Tensor, DraftProbs, TreeTables], RuleTerms]
Tables = list[Tensor]  # tables[n] is [W**n, W]: what follows each history of n tokens


class Drafts(NamedTuple):
    """All P things a drafter may do after each of R histories."""

    tokens: Tensor  # [R, P, K]
    weight: Tensor  # [R, P]
    q: DraftProbs  # [R * P, K, ...], as reported


class Walker(NamedTuple):
    """What a drafter is asked: all assignments of tokens to the nodes of a shape."""

    parents: list[int]
    width: int  # of the target

    @property
    def depth(self) -> int:
        return max(measure(node_parents(self.parents)).depths)

    def by_depth(self) -> list[int]:
        depths = measure(node_parents(self.parents)).depths
        return sorted(range(len(self.parents)), key=lambda node: depths[node])


DrafterFn = Callable[[int, Walker], Drafts]  # (history length, shape) -> all drafts


def random_tables(width: int, depth: int, seed: int, known: int | None = None) -> Tables:
    """Give random distributions over `known` ids after each history of `width` ids."""
    generator = torch.Generator().manual_seed(seed)
    shape = known or width
    return [
        torch.softmax(
            torch.randn(width**n, shape, generator=generator, dtype=torch.float64) * 1.5, -1
        )
        for n in range(depth)
    ]


def filtered(tables: Tables, params: SamplingParams) -> Tables:
    """Apply the processors that the sampler applies."""
    batch = SamplingBatch.build([params], "cpu")
    return [processed_probs(t.log()[None], batch).probs[0] for t in tables]


def node_rows(tables: Tables, n: int, shape: Walker, tokens: Tensor) -> Tensor:
    """Give the rows [R, P, K+1, W'] after the anchor and after each node; NaN after ids that the
    target does not know."""
    r, p, k = tokens.shape
    history = torch.zeros(r, p, k + 1, dtype=torch.int64)
    history[..., 0] = torch.arange(r)[:, None]
    known = torch.ones(r, p, k + 1, dtype=torch.bool)
    depths = [0] * (k + 1)
    for node in shape.by_depth():
        parent, token = shape.parents[node] + 1, tokens[..., node]
        inside = (token >= 0) & (token < shape.width)
        known[..., node + 1] = known[..., parent] & inside
        place = history[..., parent] * shape.width + token.clamp(0, shape.width - 1)
        history[..., node + 1] = place
        depths[node + 1] = depths[parent] + 1
    rows = [tables[n + depths[row]][history[..., row]] for row in range(k + 1)]
    return torch.where(known[..., None], torch.stack(rows, dim=2), torch.nan)


def shape_tables(parents: list[int], count: int) -> TreeTables:
    """Give the tables of `count` requests with this tree."""
    trees, counts = [keep_nodes(parents, 63, 63)] * count, [len(parents)] * count
    sent = send_arrays(tree_arrays(trees, counts, len(parents)), torch.device("cpu"))
    return tree_tables(sent, trees, counts)


def block(target: Tables, shape: Walker, drafter: DrafterFn, rule: TreeRuleFn, n: int):
    """Give the chance [W**n, W**m] of emitting each m = 1 .. depth+1 tokens after each history."""
    drafts, width = drafter(n, shape), shape.width
    r, p, k = drafts.tokens.shape
    rows = node_rows(target, n, shape, drafts.tokens).view(r * p, k + 1, width)
    terms = rule(rows, drafts.tokens.view(r * p, k), drafts.q, shape_tables(shape.parents, r * p))
    accept = terms.accept.view(r, p, k)
    correction = terms.correction.view(r, p, k + 1, width)
    reach = {0: drafts.weight}
    prefix = {0: torch.zeros(r, p, dtype=torch.int64)}
    out = [torch.zeros(r, width**m, dtype=torch.float64) for m in range(1, shape.depth + 2)]
    length = {0: 0}
    for row in [0, *(node + 1 for node in shape.by_depth())]:
        at = reach[row]
        for child in [c for c, parent in enumerate(shape.parents) if parent + 1 == row]:
            chance = torch.where(at > 0, accept[..., child], 0.0)
            reach[child + 1], at = at * chance, at * (1 - chance)
            token = drafts.tokens[..., child].clamp(0, width - 1)
            prefix[child + 1] = prefix[row] * width + token
            length[child + 1] = length[row] + 1
        left = correction[..., row, :]
        mass = at[..., None] * left / left.sum(-1, keepdim=True)
        mass = torch.where(at[..., None] > 0, mass, 0.0)  # rows out of reach may hold anything
        flat = out[length[row]].view(r, -1, width)
        flat.scatter_add_(1, prefix[row][..., None].expand(-1, -1, width), mass)
    return out


def followed(target: Tables, shape: Walker, drafter: DrafterFn, n: int) -> list[Tensor]:
    """Give the same of a tree whose path the target's own draw of each row decides (sample-match),
    summed over all draws of all rows."""
    drafts, width = drafter(n, shape), shape.width
    r, p, k = drafts.tokens.shape
    rows = node_rows(target, n, shape, drafts.tokens)
    rows = torch.where(rows.isnan(), 1 / width, rows)  # behind ids that nobody can follow
    drawn = torch.cartesian_prod(*[torch.arange(width)] * (k + 1))
    chance = rows[:, :, torch.arange(k + 1), drawn].prod(-1) * drafts.weight[..., None]
    every = (r, p, len(drawn), -1)
    tokens = drafts.tokens[:, :, None].expand(every).reshape(-1, k)
    own = drawn.expand(every).reshape(-1, k + 1)
    result, _ = follow(own, tokens, shape_tables(shape.parents, len(own)))
    emitted, count = result.tokens, (result.tokens >= 0).sum(1)
    assert torch.equal(count, result.num_accepted + 1)
    history = torch.arange(r)[:, None, None].expand(every[:3]).reshape(-1)
    out = [torch.zeros(r, width**m, dtype=torch.float64) for m in range(1, shape.depth + 2)]
    for m, into in enumerate(out, start=1):
        here = count == m
        place = torch.zeros(int(here.sum()), dtype=torch.int64)
        for column in range(m):
            place = place * width + emitted[here, column]
        into.view(-1).index_add_(0, history[here] * width**m + place, chance.reshape(-1)[here])
    return out


def continued(target: Tables, chance: Tensor, length: int, total: int) -> Tensor:
    """Let the target itself finish outputs [W**length] up to `total` tokens."""
    for n in range(length, total):
        chance = (chance[:, None] * target[n]).flatten()
    return chance


def total_variation(
    target: Tables, shape: Walker, drafter: DrafterFn, rule: TreeRuleFn | None
) -> float:
    """Compare the output of two consecutive blocks with the target's own.

    Args:
        target: its tables.
        shape: of the trees.
        drafter: all that it may draft.
        rule: None for sample-match.
    """

    def blocks(n: int) -> list[Tensor]:
        if rule is None:
            return followed(target, shape, drafter, n)
        return block(target, shape, drafter, rule, n)

    total = 2 * (shape.depth + 1)
    got = torch.zeros(shape.width**total, dtype=torch.float64)
    for m1, first in enumerate(blocks(0), start=1):
        for m2, second in enumerate(blocks(m1), start=1):
            got += continued(target, (first[0][:, None] * second).flatten(), m1 + m2, total)
    want = continued(target, torch.ones(1, dtype=torch.float64), 0, total)
    assert abs(want.sum().item() - 1) < 1e-12
    return 0.5 * (got - want).abs().sum().item()
