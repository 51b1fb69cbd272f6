"""Training losses on hidden states, the output projection included so that one graph fuses both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats.

    Args:
        hidden: [B, S, D], after the final norm.
        head: [W, D], the output projection.
        targets: [B, S] int64.
    """
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def distillation_loss(
    hidden: Tensor, head: Tensor, target_logits: Tensor, variation_share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Distance of the draft's distribution q from the target's p, averaged over positions.

    The loss is (1 - share) KL(p || q) + share TV(p, q). The forward divergence has a gradient
    everywhere; the total variation is what counts: a draft sampled from q is accepted with
    probability 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192, section 3.3).

    Args:
        hidden: [B, S, D] of the draft.
        head: [W, D] of the draft.
        target_logits: [B, S, W].
        variation_share: scalar in [0, 1], a tensor so that its change compiles nothing anew.

    Returns:
        (loss, KL in nats, TV), scalars.
    """
    log_q = F.log_softmax(F.linear(hidden, head).float(), dim=-1)
    log_p = F.log_softmax(target_logits.float(), dim=-1)
    p, q = log_p.exp(), log_q.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    variation = 0.5 * (p - q).abs().sum(-1).mean()
    loss = torch.lerp(divergence, variation, variation_share)
    return loss, divergence.detach(), variation.detach()
