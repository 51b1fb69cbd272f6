"""An MTP module under training, used again for every depth as it is when it serves.

At depth d row i takes token i + 1 and the module's own output of row i - 1 at depth d - 1 (the
target's state at depth 1), and sees true rows (depth 1) up to i - d + 1, then one row of each depth
after it: row i - 1 of depth d - 1, say. That is the cache of a drafter d - 1 drafts behind its
anchor, for all anchors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pairtrain.dense_attention import attend, project
from pairtrain.draft_loss import DraftLoss, RowLoss
from pairtrain.frozen_target import FrozenTarget, TargetRows
from pairtrain.network import initialise
from specmla import MTPModule, save_part

DECAY = 0.8  # weight of a depth against the one before it


class MTPTrainee:
    """Trains one module for `depth` drafts; it begins as the target's last layer.

    Args:
        target: gives sizes, embedding and head.
        depth: K.
        seed: of the initial weights.
        row_loss: `pairtrain.draft_loss.row_loss`, compiled or not.
    """

    name = "mtp"
    layers: tuple[int, ...] = ()

    def __init__(
        self, target: FrozenTarget, depth: int, seed: int, row_loss: Callable[..., RowLoss]
    ) -> None:
        self._target, self._row_loss, self.num_drafts = target, row_loss, depth
        self.module = MTPModule(target.config)
        initialise(self.module, 1, torch.Generator().manual_seed(seed))
        self._begin_as_last_layer()
        self.module.to(target.device).requires_grad_(True)
        self._masks: list[Tensor] = []

    def _begin_as_last_layer(self) -> None:
        """Take the target's last layer and pass hidden states on, as far as shapes are equal."""
        last = self._target.model.model.layers[-1].state_dict()
        own = self.module.state_dict()
        if all(name in own and own[name].shape == value.shape for name, value in last.items()):
            self.module.load_state_dict(last, strict=False)
        width = self._target.config.attention.hidden_size
        with torch.no_grad():
            self.module.eh_proj.weight[:, width:] += torch.eye(width)

    def loss(self, rows: TargetRows, generator: torch.Generator, share: Tensor) -> DraftLoss:
        """Run all depths on windows [B, S] of tokens; S - 1 rows each."""
        place = torch.arange(rows.tokens.shape[1] - 1, device=rows.tokens.device)
        found: list[RowLoss] = []
        acceptance, match = [], []
        for depth, out in enumerate(self.outputs(rows)):
            weight = (place >= depth).float().expand(len(out), -1)
            found.append(self._rows(out, rows.final[:, 1:], weight, share))
            acceptance.append(_mean(1 - found[-1].variation, weight))
            match.append(_mean(found[-1].match.float(), weight))
        weights = [DECAY**d / sum(DECAY**e for e in range(len(found))) for d in range(len(found))]
        return DraftLoss(
            sum((w * f.loss for w, f in zip(weights, found, strict=True)), torch.zeros_like(share)),
            sum((f.divergence for f in found), torch.zeros_like(share)) / len(found),
            torch.stack(acceptance),
            torch.stack(match),
        )

    def outputs(self, rows: TargetRows) -> Iterator[Tensor]:
        """Yield the states for the head of every depth, [B, S - 1, D].

        Row i of depth d drafts token i + 2, d - 1 drafts behind its anchor; those of i < d - 1 have
        no anchor.
        """
        target, module = self._target, self.module
        count = rows.tokens.shape[1] - 1
        positions = torch.arange(count, device=rows.tokens.device)
        angles, embedded = target.angles(positions), target.embed(rows.tokens[:, 1:])
        hidden, keys, values = rows.final[:, :-1], [], []
        for mask in self._depth_masks(count, positions.device):
            fused = module.fuse(embedded, hidden, positions)
            heads = project(module.self_attn, module.input_layernorm(fused), angles)
            keys.append(heads.key)
            values.append(heads.value)
            x = fused + attend(
                module.self_attn, heads.query, torch.cat(keys, 1), torch.cat(values, 1), mask
            )
            x = x + module.mlp(module.post_attention_layernorm(x))
            out = module.normed(x)
            yield out
            hidden = torch.cat((torch.zeros_like(out[:, :1]), out[:, :-1]), dim=1)

    def _rows(self, out: Tensor, teacher: Tensor, weight: Tensor, share: Tensor) -> RowLoss:
        return self._row_loss(
            out.flatten(0, 1),
            None,
            teacher.flatten(0, 1),
            self._target.head,
            weight.flatten(),
            share,
        )

    def _depth_masks(self, count: int, device: torch.device) -> list[Tensor]:
        """Give the mask [rows, depth * rows] of each depth, over the keys of all depths so far."""
        if not self._masks or self._masks[0].shape[0] != count:
            row = torch.arange(count, device=device)[:, None]
            column = torch.arange(count, device=device)
            self._masks = []
            for depth in range(self.num_drafts):
                own = [column == row - depth + d for d in range(1, depth + 1)]
                self._masks.append(torch.cat([column <= row - depth, *own], dim=1))
        return self._masks

    def save(self, folder: Path) -> None:
        """Write the module in bfloat16 under its Hugging Face names."""
        config = self._target.config
        saved = MTPModule(config).to(torch.bfloat16)
        saved.load_state_dict(self.module.state_dict())
        source = config.to_hf() | {"num_nextn_predict_layers": 1}
        save_part(saved, folder, source, f"model.layers.{config.num_layers}.")


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return (values.view_as(weight) * weight).sum() / weight.sum()
