"""AdamW with clipping and the schedule's learning rate, for one model."""

from __future__ import annotations

import torch
from torch import nn

from pairtrain.schedule import rate_factor

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


class Optimiser:
    """Steps a model's parameters; matrices decay, embeddings and norm gains do not."""

    def __init__(self, model: nn.Module, peak_rate: float) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        plain = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self._parameters = decayed + plain
        self._peak_rate = peak_rate
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": WEIGHT_DECAY},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=peak_rate,
            betas=BETAS,
            fused=self._parameters[0].is_cuda,
        )

    def step(self, loss: torch.Tensor, progress: float) -> None:
        """Descend along the gradient of `loss` at the rate that `progress` (0 to 1) gives."""
        for group in self._adam.param_groups:
            group["lr"] = self._peak_rate * rate_factor(progress)
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        self._adam.step()
