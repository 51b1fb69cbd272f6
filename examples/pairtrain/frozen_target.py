"""The target of a drafter's training: the states of whole sequences, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from pairtrain.network import PairAngles, pair_angles, run_layer
from specmla import FINAL, DeepseekDecoderLayer, RopeAngles, StateCollector, load_checkpoint
from specmla.models.config import DeepseekConfig


class TargetRows(NamedTuple):
    """One batch of the target.

    Attributes:
        tokens: [B, S] int64.
        final: [B, S, D], after the final norm.
        states: the output of decoder layers, by layer.
    """

    tokens: Tensor
    final: Tensor
    states: dict[int, Tensor]


class FrozenTarget:
    """A checkpoint in float32; matrix products are in bfloat16 on a GPU.

    Args:
        folder: of the checkpoint, any that the library loads.
        device: where it runs.
        compile: compile the layers of a dense model with plain rotary positions.
    """

    def __init__(self, folder: Path, device: torch.device, compile: bool) -> None:
        self.model, self.config = load_checkpoint(folder, device=device, dtype=torch.float32)
        self.device, dims = device, self.config.attention
        self._plain = dims.rope_scaling is None and dims.rope_interleave
        compiled = compile and self._plain and self.config.moe is None
        self._layer = torch.compile(run_layer, dynamic=False) if compiled else run_layer

    @property
    def head(self) -> Tensor:
        """The output projection [W, D]."""
        tied = self.config.tie_word_embeddings
        return (self.model.model.embed_tokens if tied else self.model.lm_head).weight

    def precision(self) -> torch.autocast:
        """Compute matrix products in bfloat16 on a GPU, in float32 on a CPU."""
        kind = self.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up [..., D]."""
        embedded: Tensor = self.model.model.embed_tokens(tokens)
        return embedded

    def angles(self, positions: Tensor) -> PairAngles | RopeAngles:
        """Give the rotary angles at `positions` [...]."""
        if self._plain:
            return pair_angles(self.config.attention, positions)
        return self.model.model.rotary.at(positions, torch.float32)

    @torch.no_grad()
    def run(self, tokens: Tensor, layers: Sequence[int]) -> TargetRows:
        """Run [B, S] int64 and keep the output of `layers`."""
        decoder = self.model.model
        with self.precision():
            if not self._plain:
                kept = StateCollector([*layers, FINAL], self.config.num_layers)
                final = decoder.forward_full(tokens, kept)
                return TargetRows(tokens, final, {i: kept[i] for i in layers})
            angles = pair_angles(
                self.config.attention, torch.arange(tokens.shape[1], device=tokens.device)
            )
            x, states = decoder.embed_tokens(tokens), {}
            for i, layer in enumerate(decoder.layers):
                x = self._layer(cast("DeepseekDecoderLayer", layer), x, angles.cos, angles.sin)
                if i in layers:
                    states[i] = x
            return TargetRows(tokens, decoder.norm(x), states)


def sampler_problems(config: DeepseekConfig) -> list[str]:
    """List why `LatentSampler` can't continue text of a target."""
    dims, found = config.attention, []
    if config.moe is not None:
        found.append("it has experts")
    if not config.tie_word_embeddings:
        found.append("its head is not its embedding")
    if dims.q_lora_rank is not None:
        found.append("its queries have a bottleneck")
    if dims.rope_scaling is not None or not dims.rope_interleave:
        found.append("its rotary positions are scaled or not interleaved")
    return found
