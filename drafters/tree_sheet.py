"""The nodes of drawn trees while they are drawn: tokens, and what each was drawn from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specmla import (
    DraftProposal,
    Stream,
    draw_siblings,
    processed_probs,
    send_arrays,
    uniforms,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.tree_shape import TreePlan
    from specmla import DraftRequest, SamplingCache


class TreeSheet:
    """Fills the levels of one shape for B requests.

    Children of sampled requests are drawn without replacement from the parent's row, processed as
    the target's rows are; where that is exhausted there is no draft (-1). Greedy requests take the
    likeliest ids.

    Args:
        plan: the shape.
        requests: B requests.
        anchors: [B] int64, positions of the anchors, the key of the random numbers.
        sampling: keeps the parameters on the device.
        num_rates: most children of a node, in any tree.
        vocab_size: W.
    """

    def __init__(
        self,
        plan: TreePlan,
        requests: Sequence[DraftRequest],
        anchors: Tensor,
        sampling: SamplingCache,
        *,
        num_rates: int,
        vocab_size: int,
    ) -> None:
        self.plan, self.anchors, self._vocab_size = plan, anchors, vocab_size
        self._num_rates = num_rates
        shape = (len(requests), len(plan.paths))
        self.tokens = torch.full(shape, -1, dtype=torch.int64, device=anchors.device)
        self.probs: Tensor | None = None
        self._batch = sampling.get(r.sampling for r in requests)
        self._mixed = any(r.sampling.temperature == 0 for r in requests)

    def fill(self, level: int, logits: Tensor) -> None:
        """Choose the nodes of a level from the logits [B, P, W] of the P parents they have."""
        of = self.plan.levels[level]
        sent = send_arrays(
            {
                "nodes": array("q", of.nodes),
                "places": array("q", of.places),
                "keys": array("q", [self.plan.key(node, self._num_rates) for node in of.parents]),
            },
            logits.device,
        )
        nodes, places = sent["nodes"], sent["places"]
        if self._batch.all_greedy:
            chosen = logits.topk(of.most, dim=-1).indices
            self.tokens[:, nodes] = chosen.flatten(1)[:, places]
            return
        tokens, probs = self._draw(logits, sent["keys"], of.most)
        if self.probs is None:
            self.probs = probs.new_zeros(*self.tokens.shape, self._vocab_size)
        self.tokens[:, nodes] = tokens.flatten(1)[:, places]
        self.probs[:, nodes] = probs.flatten(1, 2)[:, places]

    def _draw(self, logits: Tensor, keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Draw children [B, P, m] of parents with keys [P]; give them and their distributions."""
        b, p, width = logits.shape
        q = processed_probs(logits, self._batch).probs
        ranks = torch.arange(most, device=logits.device).repeat(p)
        rows = keys[:, None].expand(-1, most).reshape(-1)
        u = uniforms(self._batch.seeds, self.anchors, rows, Stream.DRAFT, ranks)
        drawn = draw_siblings(q.view(b * p, width), u.view(b * p, most))
        tokens, probs = drawn.tokens.view(b, p, most), drawn.probs.view(b, p, most, width)
        if self._mixed:
            greedy = (self._batch.temperature == 0)[:, None, None]
            likeliest = logits.topk(most, dim=-1).indices
            tokens = torch.where(greedy, likeliest, tokens)
            one_hot = torch.zeros_like(probs).scatter_(3, likeliest[..., None], 1.0)
            probs = torch.where(greedy[..., None], one_hot, probs)
        return tokens, probs

    def proposal(
        self, plans: Sequence[TreePlan], requests: Sequence[DraftRequest]
    ) -> DraftProposal:
        """Give the proposal.

        Args:
            plans: for each of the B requests the nodes that it may have, a part of the shape.
            requests: the B requests, then others, which get no drafts.
        """
        width = max((len(plan.paths) for plan in plans), default=0)
        places = array("q")
        for plan in plans:
            places.extend(self.plan.place[path] for path in plan.paths)
            places.extend([-1] * (width - len(plan.paths)))
        sent = send_arrays({"places": places}, self.tokens.device)
        index = sent["places"].view(len(plans), width)
        tokens = self.tokens.gather(1, index.clamp(min=0)).where(index >= 0, -1)
        probs = self.probs
        if probs is not None:
            at = index.clamp(min=0)[..., None].expand(-1, -1, self._vocab_size)
            probs = probs.gather(1, at)
        missing = len(requests) - len(plans)
        if missing:
            tokens = torch.cat((tokens, tokens.new_full((missing, width), -1)))
            if probs is not None:
                probs = torch.cat((probs, probs.new_zeros(missing, *probs.shape[1:])))
        return DraftProposal(
            tuple(r.request_id for r in requests),
            (*(len(plan.paths) for plan in plans), *[0] * missing),
            tokens,
            probs,
            (*(plan.parents for plan in plans), *[None] * missing),
        )
