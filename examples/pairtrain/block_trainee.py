"""A DFlash or DSpark network under training: many blocks of a sequence at once.

Anchors are drawn at random; their blocks stand side by side as queries over [context | blocks],
each row seeing the context before its anchor and its own block.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.block_config import BlockConfig
from drafters.block_model import BlockDraftModel, save_block_model
from pairtrain.dense_attention import attend, project
from pairtrain.draft_loss import DraftLoss, RowLoss
from pairtrain.frozen_target import FrozenTarget, TargetRows
from pairtrain.network import initialise
from specmla import DeepseekDecoderLayer, RopeAngles

GAMMA = 4.0  # weights of the drafts fall as exp(-j / GAMMA)
ANCHOR_SPACING = 8  # tokens of a window to one anchor


class BlockTrainee:
    """Trains a block network against a target.

    Args:
        config: of the network; its architecture names the method.
        target: gives states, embedding and head.
        seed: of the initial weights.
        row_loss: `pairtrain.draft_loss.row_loss`, compiled or not.
    """

    def __init__(
        self,
        config: BlockConfig,
        target: FrozenTarget,
        seed: int,
        row_loss: Callable[..., RowLoss],
    ) -> None:
        self.name = "dspark" if config.architecture == "DSparkDraftModel" else "dflash"
        self.layers, self.num_drafts = config.target_layer_ids, config.num_drafts
        self._config, self._target, self._row_loss = config, target, row_loss
        self.module = BlockDraftModel(config)
        initialise(self.module, config.num_layers, torch.Generator().manual_seed(seed))
        # So scaled, the first logits deviate by about 1, whatever the head's.
        torch.nn.init.constant_(self.module.norm.weight, 1 / float(target.head.norm(dim=1).mean()))
        if config.markov_rank:
            torch.nn.init.normal_(self.module.markov_head.markov_w1.weight, std=0.1)
            torch.nn.init.zeros_(self.module.markov_head.markov_w2.weight)
        if config.confidence_head:
            torch.nn.init.zeros_(self.module.confidence_head.proj.bias)
        self.module.to(target.device).requires_grad_(True)

    def loss(self, rows: TargetRows, generator: torch.Generator, share: Tensor) -> DraftLoss:
        """Draft behind random anchors of windows [B, S]."""
        count, drafts = rows.tokens.shape[1], self.num_drafts
        anchors = self._draw_anchors(rows.tokens, count, generator)
        hidden = self.outputs(rows, anchors)
        places = anchors[..., None] + torch.arange(drafts, device=anchors.device)
        index = places.flatten(1)
        teacher = _take(rows.final, index)
        weight = torch.exp(-torch.arange(drafts, device=anchors.device) / GAMMA)
        weight = weight.expand(places.shape).flatten()
        flat, state, bias = hidden.flatten(0, 2), None, None
        if self.module.has_markov:
            state = self.module.markov_state(rows.tokens.gather(1, index).flatten())
            bias = self.module.markov_logits(state)
        found = self._row_loss(flat, bias, teacher.flatten(0, 1), self._target.head, weight, share)
        accepted = 1 - found.variation
        loss = found.loss
        if self._config.confidence_head:
            score = self.module.confidence_logit(
                flat.detach(), None if state is None else state.detach()
            )
            wrong = F.binary_cross_entropy_with_logits(score.float(), accepted, reduction="none")
            loss = loss + (wrong * weight).sum() / weight.sum()
        by_place = (-1, drafts)
        return DraftLoss(
            loss,
            found.divergence,
            accepted.view(by_place).mean(0),
            found.match.view(by_place).float().mean(0),
        )

    def _draw_anchors(self, tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Give [B, A] positions with a row before and K - 1 rows after them."""
        number = max(count // ANCHOR_SPACING, 1)
        return torch.randint(
            1,
            count - self.num_drafts + 1,
            (len(tokens), number),
            generator=generator,
            device=tokens.device,
        )

    def outputs(self, rows: TargetRows, anchors: Tensor) -> Tensor:
        """Run the blocks of `anchors` [B, A]; [B, A, K, D] of the rows that predict."""
        config, module, target = self._config, self.module, self._target
        # Nothing sees the last row; without it the keys' number is a multiple of 8 on most windows.
        size, count = config.block_size, rows.tokens.shape[1] - 1
        states = torch.cat([rows.states[i][:, :count] for i in self.layers], dim=-1)
        context = module.context(states)
        before = target.angles(torch.arange(count, device=anchors.device))
        places = anchors[..., None] + torch.arange(size, device=anchors.device)
        within = target.angles(places.flatten(1))
        mask = _block_mask(anchors, size, count)
        ids = torch.full_like(places, config.mask_token_id)
        ids[..., 0] = rows.tokens.gather(1, anchors)
        x = target.embed(ids.flatten(1))
        for index, layer in enumerate(module.layers):
            layer = cast("DeepseekDecoderLayer", layer)
            inner = layer.self_attn
            heads = project(inner, layer.input_layernorm(x), within)
            latent = module.context_latent(index, context, cast("RopeAngles", before))
            key, value = inner.kv_b_proj.expand(*latent)
            x = x + attend(
                inner,
                heads.query,
                torch.cat((key, heads.key), dim=1),
                torch.cat((value, heads.value), dim=1),
                mask,
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: Tensor = module.norm(x).unflatten(1, (anchors.shape[1], size))
        return hidden if config.sample_from_anchor else hidden[:, :, 1:]

    def save(self, folder: Path) -> None:
        """Write the network in bfloat16."""
        saved = BlockDraftModel(self._config).to(torch.bfloat16)
        saved.load_state_dict(self.module.state_dict())
        save_block_model(saved, folder)


def _block_mask(anchors: Tensor, size: int, count: int) -> Tensor:
    """Give [B, 1, A * size, count + A * size]: context before the anchor, and the own block."""
    number = anchors.shape[1]
    seen = torch.arange(count, device=anchors.device) < anchors[..., None]
    seen = seen.repeat_interleave(size, dim=1)
    block = torch.arange(number, device=anchors.device).repeat_interleave(size)
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat((seen, own), dim=2)[:, None]


def _take(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
