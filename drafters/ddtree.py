"""DDTree (arXiv:2604.12989): the best tree under a node budget from a block's marginals.

A block drafter gives one distribution a position, all in one pass. A node of depth d is a choice of
ids for the first d positions, and its chance is the product of theirs. The n likeliest nodes form a
tree (a node is never likelier than its parent), found best first. Children are chosen and not
drawn, so their draft distribution is one-hot. For sampled requests they may be drawn instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from drafters.best_tree import BestTree, best_tree
from drafters.tree_shape import RATES, check_rates, deepest, plan_tree, union
from drafters.tree_sheet import TreeSheet
from specmla import ArgumentError, DraftProposal, SamplingCache

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block import BlockDrafter, BlockOutput
    from specmla import DraftRequest, HiddenRows, RequestResult


class DDTreeDrafter:
    """Proposes trees from the marginals of a block drafter, which it drives.

    Batches of greedy requests alone get the best trees. A sampled request accepts a drawn child
    more often than a chosen one, so if there is any, the shape is planned (`plan_tree`) and the
    children of sampled requests are drawn from the marginals without replacement.

    Args:
        blocks: runs the blocks (`DFlashDrafter`); nobody else may use it.
        num_nodes: most nodes of a tree, and fewer where `DraftRequest.num_nodes` says so; None: as
            many as that says.
        drawn: draw for sampled requests; else they get the best trees as well.
        rates: assumed chances of a node's children in the order of drawing; they shape drawn trees.

    Raises:
        ArgumentError: a budget below 1, rates that no tree can be planned from.
    """

    drafts_trees = True

    def __init__(
        self,
        blocks: BlockDrafter,
        num_nodes: int | None = None,
        *,
        drawn: bool = True,
        rates: Sequence[float] = RATES,
    ) -> None:
        if num_nodes is not None and num_nodes < 1:
            raise ArgumentError(f"num_nodes is {num_nodes}, accepted are values >= 1, or None")
        check_rates(tuple(rates), 1)
        self.blocks, self.num_nodes, self.drawn = blocks, num_nodes, drawn
        self.rates = tuple(rates)[: blocks.vocab_size]
        self.vocab_size, self.hidden_layers = blocks.vocab_size, blocks.hidden_layers
        self._sampling: SamplingCache | None = None

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Propose a tree for each request whose context is known; nothing for others.

        Best trees wait for the device once: the host must know them to build their masks. Drawn
        ones, whose shape is planned, don't.
        """
        output = self.blocks.run_blocks(requests)
        names = [r.request_id for r in requests]
        if output is None:
            return DraftProposal(tuple(names), (0,) * len(names), torch.empty(len(names), 0).long())
        if self.drawn and any(r.sampling.temperature > 0 for r, _ in output.wanted):
            return self._draw(output)
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

    @torch.no_grad()
    def _draw(self, output: BlockOutput) -> DraftProposal:
        """Fill planned trees; all nodes of a level share the marginal of its position."""
        requests, anchors = [w.request for w in output.wanted], output.anchors
        most = deepest(len(self.rates))
        plans = [
            plan_tree(self._budget(r), min(depth, most), self.rates) for r, depth in output.wanted
        ]
        if self._sampling is None:
            self._sampling = SamplingCache(anchors.device)
        sheet = TreeSheet(
            union(frozenset(plans)),
            requests,
            anchors,
            self._sampling,
            num_rates=len(self.rates),
            vocab_size=self.vocab_size,
        )
        for level, of in enumerate(sheet.plan.levels):
            sheet.fill(level, output.logits[:, level, None].expand(-1, len(of.parents), -1))
        return sheet.proposal(plans, [*requests, *output.others])

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
