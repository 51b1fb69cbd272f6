"""Trees from a separate draft model, level by level, over its own paged cache.

A pass runs the anchor and all inner nodes drawn so far as a tree, and its new rows give the next
level; so L levels take L passes, as a chain of L drafts does. The rows of an accepted path are then
moved to the front, as the target's are.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from drafters.draft_cache import given_back_by_errors
from drafters.draft_model import DraftModelDrafter
from drafters.tree_shape import RATES, TreePlan, check_rates, plan_tree, union
from drafters.tree_sheet import TreeSheet
from specmla import (
    DraftMask,
    DraftProposal,
    RequestKind,
    RequestRows,
    UnsupportedError,
    send_arrays,
)

if TYPE_CHECKING:
    from torch import Tensor

    from specmla import (
        Bucket,
        DeepseekForCausalLM,
        DraftRequest,
        HiddenRows,
        RequestResult,
        SamplingParams,
    )


class DraftModelTreeDrafter(DraftModelDrafter):
    """Drafts trees with a model of the target's vocabulary.

    Args:
        model: the draft model; may live on another dtype, page size and backend than the target.
        num_pages: pages of its pool.
        page_size: tokens a page.
        backend: attention backend by name, the best one if None.
        depth: most levels of a tree, one pass each.
        rates: assumed chances of a node's children in the order of drawing; they shape the trees.

    Raises:
        ArgumentError: a depth below 1, rates that `plan_tree` refuses.
        UnsupportedError: no backend can serve the model, or not with trees.
    """

    drafts_trees = True

    def __init__(
        self,
        model: DeepseekForCausalLM,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
        depth: int = 4,
        rates: Sequence[float] = RATES,
    ) -> None:
        check_rates(tuple(rates), depth)
        super().__init__(model, num_pages=num_pages, page_size=page_size, backend=backend)
        has = self.builder.backend.capabilities
        if DraftMask.TREE not in has.masks:
            raise UnsupportedError(has.name, ["it serves no trees"])
        self.depth, self.rates = depth, tuple(rates)[: self.vocab_size]
        self._plans: dict[Hashable, TreePlan] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Draft a tree for each request; none where the draft model's own context ends.

        Raises:
            PoolFullError: the draft pool is too small; nothing was reserved.
        """
        drafted = [(r, plan) for r in requests if (plan := self._plan(r)).paths]
        wanted, plans = [r for r, _ in drafted], [plan for _, plan in drafted]
        drawn = {r.request_id for r in wanted}
        ordered = [*wanted, *(r for r in requests if r.request_id not in drawn)]
        if not wanted:
            names = tuple(r.request_id for r in ordered)
            return DraftProposal(names, (0,) * len(names), torch.empty(len(names), 0).long())
        with given_back_by_errors(self.blocks, list(drawn)):
            self._reserve([(r, len(plan.inner) + 1) for r, plan in drafted])
            sheet = self._draw(wanted, plans)
        self._drafted |= {r.request_id: (len(r.tokens), len(plan.inner) + 1) for r, plan in drafted}
        self._plans |= {r.request_id: plan for r, plan in drafted}
        return sheet.proposal(plans, ordered)

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Capture nothing: the rows of a tree's passes differ from step to step."""

    def _plan(self, r: DraftRequest) -> TreePlan:
        """Choose a request's tree by its own limits; what has rows must fit the model's context."""
        depth = min(self.depth, r.num_drafts)
        plan = plan_tree(r.num_nodes or r.num_drafts, depth, self.rates)
        fits = len(r.tokens) + len(plan.inner) <= self.builder.max_seq_len
        return plan if fits else plan_tree(0, 1, self.rates)

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Move the rows of accepted paths to the front, roll the others back."""
        sources, targets = array("q"), array("q")
        lengths = []
        for result in results:
            drafted = self._drafted.pop(result.request_id, None)
            if drafted is None:
                continue
            length, plan = drafted[0], self._plans.pop(result.request_id)
            path = range(result.num_accepted) if result.path is None else result.path
            rows = [plan.inner.index(node) for node in path if node in plan.inner]
            sources.extend(self._slots(result.request_id, [length + row for row in rows]))
            targets.extend(self._slots(result.request_id, range(length, length + len(rows))))
            self._tokens[result.request_id].extend(result.new_tokens)
            kept = min(len(rows), len(result.new_tokens))
            lengths.append((result.request_id, length + kept))
        if targets:
            sent = send_arrays({"from": sources, "to": targets}, self.builder.device)
            self.cache.move(sent["from"], sent["to"])
        for request_id, length in lengths:
            self.blocks.commit(request_id, length, self._tokens[request_id])

    def reset(self, request_id: Hashable) -> None:
        """Give the pages of a request back."""
        self._plans.pop(request_id, None)
        super().reset(request_id)

    def _slots(self, request_id: Hashable, positions: Sequence[int]) -> list[int]:
        pages, size = self.blocks.block_ids(request_id), self.blocks.page_size
        return [pages[at // size] * size + at % size for at in positions]

    @torch.inference_mode()
    def _draw(self, requests: Sequence[DraftRequest], plans: Sequence[TreePlan]) -> TreeSheet:
        """Draw all levels; the first from the anchors' rows, each later one from a pass."""
        hidden, anchors = self._first_round(requests)
        whole, size = union(frozenset(plans)), self.vocab_size
        num_rates = len(self.rates)
        sheet = TreeSheet(
            whole, requests, anchors, self._sampling, num_rates=num_rates, vocab_size=size
        )
        sheet.fill(0, self.model.logits(hidden)[:, None])
        for level in range(1, whole.depth):
            sheet.fill(level, self.model.logits(self._pass(level, requests, plans, sheet)))
        return sheet

    def _pass(
        self,
        level: int,
        requests: Sequence[DraftRequest],
        plans: Sequence[TreePlan],
        sheet: TreeSheet,
    ) -> Tensor:
        """Run the anchors and all inner nodes above a level; states [B, P, D] of its parents.

        Those of parents that a request's own tree does not have are another row's.
        """
        whole, rows, count = sheet.plan, [], 0
        source, parents_at = array("q"), array("q")
        for b, (r, plan) in enumerate(zip(requests, plans, strict=True)):
            known = [node for node in plan.inner if len(plan.paths[node]) <= level]
            row = {node: i for i, node in enumerate(known, start=1)} | {-1: 0}
            links = (-1, *(row[plan.parents[node]] for node in known))
            end, pages = len(r.tokens) + len(known), self.blocks.block_ids(r.request_id)
            rows.append(RequestRows(RequestKind.VERIFY, len(links), end, pages, links))
            first = b * (1 + len(whole.paths))
            source.append(first)
            source.extend(first + 1 + whole.place[plan.paths[node]] for node in known)
            for parent in whole.levels[level].parents:
                mine = plan.place.get(whole.paths[parent], -1)
                parents_at.append(count + row.get(mine, 0))
            count += len(links)
        anchors = array("q", [r.tokens[-1] for r in requests])
        along = {"anchors": anchors, "source": source, "parents": parents_at}
        metadata = self.builder.build(rows, DraftMask.TREE, along=along)
        sent = metadata.along
        tokens = torch.cat((sent["anchors"][:, None], sheet.tokens), dim=1).view(-1)
        # What was not drawn (-1) has a row all the same; nothing that hangs on it is accepted.
        ids = tokens[sent["source"]].clamp(0, self.vocab_size - 1)
        hidden: Tensor = self.model(ids, metadata, self.cache, self.builder.backend)
        return hidden[sent["parents"]].view(len(requests), -1, hidden.shape[1])
