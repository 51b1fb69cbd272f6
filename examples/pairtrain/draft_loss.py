"""The loss of drafts on states of target and drafter, the vocabulary head included."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RowLoss(NamedTuple):
    """What a batch of rows gives.

    Attributes:
        loss: scalar, what is descended.
        divergence: scalar, KL in nats.
        variation: [N], TV of each row: a draft drawn there is accepted with probability 1 - TV.
        match: [N] bool, the likeliest token is the target's.
    """

    loss: Tensor
    divergence: Tensor
    variation: Tensor
    match: Tensor


def row_loss(
    hidden: Tensor,
    bias: Tensor | None,
    teacher: Tensor,
    head: Tensor,
    weight: Tensor,
    share: Tensor,
) -> RowLoss:
    """Distance of the drafts' distributions q from the target's p, a weighted mean over rows.

    (1 - share) KL(p || q) + share TV(p, q): the divergence has a gradient everywhere, the variation
    is what counts (Leviathan et al., arXiv 2211.17192, section 3.3).

    Args:
        hidden: [N, D] of the drafter, for the head.
        bias: [N, W] added to its logits, or None.
        teacher: [N, D] of the target, after its final norm, of the rows that predict the same.
        head: [W, D] of the target.
        weight: [N], not negative.
        share: scalar in [0, 1], a tensor so that its change compiles nothing anew.
    """
    logits = F.linear(hidden, head)
    if bias is not None:
        logits = logits + bias
    with torch.no_grad():
        target = F.linear(teacher, head).float()
        log_p = F.log_softmax(target, dim=-1)
        p = log_p.exp()
    log_q = F.log_softmax(logits.float(), dim=-1)
    divergence = (p * (log_p - log_q)).sum(-1)
    variation = 0.5 * (p - log_q.exp()).abs().sum(-1)
    weight = weight / weight.sum()
    loss = (torch.lerp(divergence, variation, share) * weight).sum()
    match = logits.argmax(-1) == target.argmax(-1)
    return RowLoss(loss, (divergence.detach() * weight).sum(), variation.detach(), match)


class DraftLoss(NamedTuple):
    """A drafter's loss on one batch.

    Attributes:
        loss, divergence: scalars.
        acceptance: [K], mean of 1 - TV by place of the draft: sum of min(p, q).
        match: [K], share of drafts that greedy decoding accepts.
    """

    loss: Tensor
    divergence: Tensor
    acceptance: Tensor
    match: Tensor
