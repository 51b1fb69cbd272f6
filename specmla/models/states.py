"""Hidden states of a forward pass that a drafter asks for, and nothing where none is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.errors import require

FINAL = -1
"""The state after the final norm; decoder layers are 0 .. L - 1, their states are raw."""


class StateCollector:
    """Keeps the states of some layers while a model runs.

    Args:
        layers: decoder layers (their output, as `hidden_states[i + 1]` of Hugging Face for all but
            the last), or `FINAL`, in the order in which they are joined.
        num_layers: L of the model.

    Raises:
        ArgumentError: no layer, one twice or one that the model does not have.
    """

    def __init__(self, layers: Sequence[int], num_layers: int) -> None:
        self.layers = tuple(layers)
        found = [
            f"layer {i} of {list(layers)} is accepted as {FINAL} or 0 .. {num_layers - 1}"
            for i in self.layers
            if not FINAL <= i < num_layers
        ]
        if not self.layers or len(set(self.layers)) < len(self.layers):
            found.append(f"layers are {list(layers)}, accepted is one or more, none twice")
        require(found, "StateCollector")
        self._kept: dict[int, Tensor] = {}

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Hear the output of a layer; it is kept only if it was asked for."""
        if layer in self.layers:
            self._kept[layer] = hidden

    def __getitem__(self, layer: int) -> Tensor:
        """Give the state of one layer, [..., D]."""
        return self._kept[layer]

    def joined(self) -> Tensor:
        """Give [..., m * D], the m states of each row side by side, in new memory if m > 1."""
        kept = [self._kept[layer] for layer in self.layers]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=-1)
