"""An EAGLE-3 head under training, used again for every depth as it is when it serves.

Rows, depths and masks are those of `MTPTrainee`: the head's own states take the place of the fused
ones (the paper's training-time test). It knows the commonest tokens of the corpus only; p outside
of them can't be drafted, and counts as refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.eagle3_config import Eagle3Config
from drafters.eagle3_model import Eagle3Model, save_eagle3
from pairtrain.dense_attention import attend, project
from pairtrain.draft_loss import RowLoss
from pairtrain.frozen_target import FrozenTarget, TargetRows
from pairtrain.mtp_trainee import MTPTrainee
from pairtrain.network import initialise

SubsetLoss = Callable[..., RowLoss]


class Eagle3Trainee(MTPTrainee):
    """Trains one head for `depth` drafts.

    Args:
        config: of the head.
        target: gives states and embedding.
        ids: [draft_vocab_size] int64, rising, the target's ids that it drafts.
        depth: K.
        seed: of the initial weights.
        subset_loss: the function below, compiled or not.
    """

    name = "eagle3"

    def __init__(
        self,
        config: Eagle3Config,
        target: FrozenTarget,
        ids: Tensor,
        depth: int,
        seed: int,
        subset_loss: SubsetLoss,
    ) -> None:
        self._target, self._subset_loss, self.num_drafts = target, subset_loss, depth
        self.layers, self._ids = config.target_layer_ids, ids.to(target.device)
        self.head = Eagle3Model(config)
        initialise(self.head, 1, torch.Generator().manual_seed(seed))
        with (
            torch.no_grad()
        ):  # it begins as the highest of the three states, under the target's head
            width = config.attention.hidden_size
            self.head.fc.weight[:, -width:] += torch.eye(width)
            self.head.norm.weight.copy_(target.model.model.norm.weight)
            self.head.lm_head.weight.copy_(target.head[self._ids])
        self.head.d2t.copy_(ids - torch.arange(len(ids)))
        self.module = self.head.to(target.device).requires_grad_(True)
        self._masks = []

    def outputs(self, rows: TargetRows) -> Iterator[Tensor]:
        """Yield the states of every depth, [B, S - 1, D], before the head's norm.

        Row i of depth d drafts token i + 2, d - 1 drafts behind its anchor; those of i < d - 1 have
        no anchor.
        """
        target, layer = self._target, self.head.layer
        count = rows.tokens.shape[1] - 1
        positions = torch.arange(count, device=rows.tokens.device)
        angles, embedded = target.angles(positions), target.embed(rows.tokens[:, 1:])
        hidden = self.head.fuse(torch.cat([rows.states[i][:, :-1] for i in self.layers], dim=-1))
        keys, values = list[Tensor](), list[Tensor]()
        for mask in self._depth_masks(count, positions.device):
            heads = project(layer.self_attn, layer.joined(embedded, hidden), angles)
            keys.append(heads.key)
            values.append(heads.value)
            attended = attend(
                layer.self_attn, heads.query, torch.cat(keys, 1), torch.cat(values, 1), mask
            )
            out = layer.finish(hidden, attended)
            yield out
            hidden = torch.cat((torch.zeros_like(out[:, :1]), out[:, :-1]), dim=1)

    def _rows(self, out: Tensor, teacher: Tensor, weight: Tensor, share: Tensor) -> RowLoss:
        return self._subset_loss(
            self.head.logits(out.flatten(0, 1)),
            self._ids,
            teacher.flatten(0, 1),
            self._target.head,
            weight.flatten(),
            share,
        )

    def save(self, folder: Path) -> None:
        """Write the head in bfloat16."""
        saved = Eagle3Model(self.head.config).to(torch.bfloat16)
        saved.load_state_dict(self.head.state_dict())
        saved.d2t.copy_(self.head.d2t)
        save_eagle3(saved, folder)


def commonest(tokens: Tensor, count: int, vocab_size: int) -> Tensor:
    """Give the `count` commonest ids of a text in rising order, on the CPU."""
    found = torch.bincount(tokens.flatten().long(), minlength=vocab_size)
    return found.topk(count).indices.sort().values.cpu()


def subset_loss(
    logits: Tensor, ids: Tensor, teacher: Tensor, head: Tensor, weight: Tensor, share: Tensor
) -> RowLoss:
    """Distance of q over some ids from the target's p, a weighted mean over rows.

    (1 - share) KL(p' || q) + share TV(p, q), p' being p on these ids, renormalised: the divergence
    from p itself has no bound.

    Args:
        logits: [N, V] of the drafter.
        ids: [V] int64, the target's ids.
        teacher: [N, D] of the target, after its final norm.
        head: [W, D] of the target.
        weight: [N], not negative.
        share: scalar in [0, 1].
    """
    with torch.no_grad():
        target = F.linear(teacher, head).float()
        p = F.softmax(target, dim=-1)[:, ids]
        log_part = F.log_softmax(target[:, ids], dim=-1)
    log_q = F.log_softmax(logits.float(), dim=-1)
    divergence = (log_part.exp() * (log_part - log_q)).sum(-1)
    variation = 1 - torch.minimum(p, log_q.exp()).sum(-1)
    weight = weight / weight.sum()
    loss = (torch.lerp(divergence, variation, share) * weight).sum()
    match = ids[logits.argmax(-1)] == target.argmax(-1)
    return RowLoss(loss, (divergence.detach() * weight).sum(), variation.detach(), match)
