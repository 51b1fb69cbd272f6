"""A model under training: the library's decoder, its batched forward and its files."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from pairtrain.size import ModelSize
from specmla.config import MLAConfig
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekDecoderLayer, DeepseekForCausalLM
from specmla.models.weights import load_checkpoint, save_checkpoint
from specmla.rope import RopeAngles

EMBEDDING_STD = 0.04
GAIN = 0.5  # of the initial matrices, in units of fan_in ** -0.5


@dataclass(frozen=True)
class PairAngles:
    """Rotary angles [..., R / 2] that rotate pairs in place of gathering partners.

    The same rotation as `specmla.rope.RopeAngles`; a gather has a scatter as its gradient, which
    takes longer than the rest of the attention at these widths.
    """

    cos: Tensor
    sin: Tensor

    def rotate_key(self, key: Tensor) -> Tensor:
        """Rotate [B, S, R]."""
        return _rotate(key, self.cos, self.sin)

    def rotate_query(self, query: Tensor) -> Tensor:
        """Rotate [B, S, H, R]."""
        return _rotate(query, self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))


class Network:
    """Runs whole batches of equally long sequences through a decoder.

    Args:
        model: the decoder, on its device.
        compile: compile the decoder layer, once for all layers of a shape.
    """

    def __init__(self, model: DeepseekForCausalLM, compile: bool) -> None:
        self.model = model
        self._layer = torch.compile(run_layer, dynamic=False) if compile else run_layer

    @classmethod
    def create(
        cls, size: ModelSize, vocab_size: int, device: torch.device, seed: int, compile: bool
    ) -> Network:
        """Build a model of `size` in float32 with initial weights that depend on `seed` only."""
        model = DeepseekForCausalLM(size.config(vocab_size))
        initialise(model, model.config.num_layers, torch.Generator().manual_seed(seed))
        return cls(model.to(device), compile)

    @classmethod
    def load(cls, folder: Path, device: torch.device, compile: bool) -> Network:
        """Load a checkpoint in float32, for inference."""
        model, _ = load_checkpoint(folder, device=device, dtype=torch.float32)
        return cls(model, compile)

    @property
    def config(self) -> DeepseekConfig:
        """Sizes of the model."""
        return self.model.config

    @property
    def head(self) -> Tensor:
        """The output projection [W, D], tied to the embedding."""
        return self.model.model.embed_tokens.weight

    def precision(self) -> AbstractContextManager[None]:
        """Compute matrix products in bfloat16 on a GPU, in float32 on a CPU."""
        device = self.head.device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map [B, S] int64 to [B, S, D] after the final norm."""
        decoder, dims = self.model.model, self.config.attention
        angles = pair_angles(dims, torch.arange(tokens.shape[1], device=tokens.device))
        x = decoder.embed_tokens(tokens)
        for layer in decoder.layers:
            x = self._layer(cast("DeepseekDecoderLayer", layer), x, angles.cos, angles.sin)
        normed: Tensor = decoder.norm(x)
        return normed

    def logits_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Give the logits [B, n, W] after `tokens` [B, S] at `positions` [B, n]."""
        hidden = self.hidden(tokens)
        index = positions[..., None].expand(-1, -1, hidden.shape[-1])
        return self.model.logits(hidden.gather(1, index))

    def save(self, folder: Path) -> None:
        """Write the model in bfloat16 and Hugging Face layout."""
        save_checkpoint(copy.deepcopy(self.model).to(torch.bfloat16), folder)


def pair_angles(dims: MLAConfig, positions: Tensor) -> PairAngles:
    """Give the angles at `positions` [...]; plain rotary positions of interleaved pairs only."""
    steps = torch.arange(0, dims.qk_rope_head_dim, 2, device=positions.device)
    frequency = dims.rope_theta ** (-steps.double() / dims.qk_rope_head_dim)
    angle = positions.unsqueeze(-1) * frequency
    return PairAngles(angle.cos().float(), angle.sin().float())


def run_layer(layer: DeepseekDecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run whole sequences [B, S, D] through a layer, on tensors alone so that it compiles."""
    return layer.forward_full(x, cast("RopeAngles", PairAngles(cos, sin)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


@torch.no_grad()
def initialise(model: nn.Module, num_layers: int, generator: torch.Generator) -> None:
    """Draw matrices of std GAIN / sqrt(fan_in); those that write to the residual are smaller.

    The last ones are divided by sqrt(2 layers), so that the stream's variance does not grow
    with depth.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, EMBEDDING_STD, generator=generator)
        elif isinstance(module, nn.Linear):
            std = GAIN / math.sqrt(module.in_features)
            if name.endswith(("o_proj", "down_proj")):
                std /= math.sqrt(2 * num_layers)
            module.weight.normal_(0.0, std, generator=generator)
