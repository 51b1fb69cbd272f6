"""DDTree (arXiv:2604.12989): the best tree under a node budget from a block's marginals.

A block drafter gives one distribution a position, all in one pass. A node of depth d is a choice of
ids for the first d positions, and its chance is the product of theirs. The n likeliest nodes form a
tree (a node is never likelier than its parent), found best first. Children are chosen and not
drawn, so their draft distribution is one-hot.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specmla import ArgumentError, DraftProposal

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block import BlockDrafter, BlockOutput
    from specmla import DraftRequest, HiddenRows, RequestResult


class BestTree(NamedTuple):
    """Nodes, likeliest first, so that each stands after its parent.

    Attributes:
        levels: position of each one's id in the block, 0 for the anchor's children.
        ranks: which of that position's ids it is, 0 for the likeliest.
        parents: place of its parent, -1 for the anchor.
        score: sum of the nodes' chances: how many would be accepted if the marginals were right.
    """

    levels: list[int]
    ranks: list[int]
    parents: list[int]
    score: float


def best_tree(log_probs: Sequence[Sequence[float]], num_nodes: int) -> BestTree:
    """Find the `num_nodes` likeliest nodes, or all there are.

    Args:
        log_probs: for each position the log-probabilities of its likeliest ids, falling. As many as
            nodes are enough; -inf stands for no id.
        num_nodes: most nodes.

    Raises:
        ArgumentError: log-probabilities that rise, are above 0 or NaN.
    """
    for level, row in enumerate(log_probs):
        falls = all(a >= b for a, b in itertools.pairwise(row))
        if not falls or not all(value <= 0 for value in row):
            raise ArgumentError(
                f"best_tree: log_probs[{level}] is {list(row)[:8]}, accepted are falling ones <= 0"
            )
    tree, heap, order = BestTree([], [], [], 0.0), list[tuple[float, int, int, int, int]](), 0
    score = 0.0

    def push(above: float, parent: int, level: int, rank: int) -> None:
        nonlocal order
        if level < len(log_probs) and rank < len(log_probs[level]):
            chance = above + log_probs[level][rank]
            if chance > -math.inf:
                heapq.heappush(heap, (-chance, order, parent, level, rank))
                order += 1

    push(0.0, -1, 0, 0)
    while heap and len(tree.parents) < num_nodes:
        cost, _, parent, level, rank = heapq.heappop(heap)
        tree.levels.append(level)
        tree.ranks.append(rank)
        tree.parents.append(parent)
        score += math.exp(-cost)
        push(-cost, len(tree.parents) - 1, level + 1, 0)
        push(-cost - log_probs[level][rank], parent, level, rank + 1)
    return tree._replace(score=score)


class DDTreeDrafter:
    """Proposes trees from the marginals of a block drafter, which it drives.

    Args:
        blocks: runs the blocks (`DFlashDrafter`); nobody else may use it.
        num_nodes: most nodes of a tree, and fewer where `DraftRequest.num_nodes` says so; None: as
            many as that says.

    Raises:
        ArgumentError: a budget below 1.
    """

    def __init__(self, blocks: BlockDrafter, num_nodes: int | None = None) -> None:
        if num_nodes is not None and num_nodes < 1:
            raise ArgumentError(f"num_nodes is {num_nodes}, accepted are values >= 1, or None")
        self.blocks, self.num_nodes = blocks, num_nodes
        self.vocab_size, self.hidden_layers = blocks.vocab_size, blocks.hidden_layers

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Propose a tree for each request whose context is known; nothing for others.

        Waits for the device once: the host must know the trees to build their masks.
        """
        output = self.blocks.run_blocks(requests)
        names = [r.request_id for r in requests]
        if output is None:
            return DraftProposal(tuple(names), (0,) * len(names), torch.empty(len(names), 0).long())
        wanted = [w.request for w in output.wanted]
        budgets = [self._budget(r) for r in wanted]
        log_probs, ids = likeliest(_marginals(output), max(budgets))
        trees = [
            best_tree(rows[:depth], budget)
            for rows, (_, depth), budget in zip(
                log_probs.tolist(), output.wanted, budgets, strict=True
            )
        ]
        return _proposal([r.request_id for r in (*wanted, *output.others)], trees, ids.tolist())

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Pass on what was accepted."""
        self.blocks.observe(results, hidden)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request."""
        self.blocks.reset(request_id)

    def _budget(self, r: DraftRequest) -> int:
        most = r.num_nodes or r.num_drafts
        return most if self.num_nodes is None else min(most, self.num_nodes)


def likeliest(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Give the `count` largest of each row [..., W], falling, and their ids, on the CPU.

    Fewer if there are fewer.
    """
    values, ids = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    return values.double().cpu(), ids.cpu()


def _marginals(output: BlockOutput) -> Tensor:
    """Log-probabilities [B, K, W] at each request's temperature; a greedy one's at 1."""
    wanted = [w.request.sampling.temperature or 1.0 for w in output.wanted]
    temperature = torch.tensor(wanted).to(output.logits.device, non_blocking=True)
    return torch.log_softmax(output.logits.float() / temperature[:, None, None], dim=-1)


def _proposal(
    names: list[Hashable], trees: list[BestTree], ids: list[list[list[int]]]
) -> DraftProposal:
    """Put the trees of the first requests together; the others get none."""
    rows = [
        [of[level][rank] for level, rank in zip(tree.levels, tree.ranks, strict=True)]
        for tree, of in zip(trees, ids, strict=True)
    ]
    rows += [[] for _ in names[len(trees) :]]
    width = max(map(len, rows))
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return DraftProposal(
        tuple(names),
        tuple(map(len, rows)),
        torch.tensor(padded, dtype=torch.int64).view(len(names), width),
        parents=(*(tree.parents for tree in trees), *[None] * (len(names) - len(trees))),
    )
