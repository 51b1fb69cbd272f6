"""Routed experts without a look at which were hit: two launches for all of them, capturable."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specmla.errors import ArgumentError, UnsupportedError, require
from specmla.models.moe import DeepseekMLP, DeepseekMoE, sum_pairs

if TYPE_CHECKING:
    from specmla.kernels.experts import ExpertWeights

MAPS = ("gate_proj", "up_proj", "down_proj")


class GroupedExperts:
    """Runs the experts of one layer by Triton, over the weights where they lie.

    Args:
        experts: of the layer, all of one shape, dtype and device.

    Raises:
        ArgumentError: weights that are not contiguous, or of float64.
    """

    def __init__(self, experts: Sequence[DeepseekMLP]) -> None:
        self.num_experts = len(experts)
        self._gate, self._up, self._down = (
            _weights([getattr(expert, name).weight for expert in experts]) for name in MAPS
        )
        self._ends = [
            getattr(expert, name) for expert in (experts[0], experts[-1]) for name in MAPS
        ]
        self._at = self._addresses()

    def __call__(
        self, rows: Tensor, weights: Tensor, chosen: Tensor, *, batch_invariant: bool = False
    ) -> Tensor:
        """Give the weighted sum [T, D] of each row's experts; nothing waits for the device.

        Args:
            rows: [T, D].
            weights: [T, k] floating.
            chosen: [T, k] int64.
            batch_invariant: tiles of one form, whatever T is, and sums in the order of choice: the
                bits of a row of the result depend on that row alone.

        Raises:
            ArgumentError: the weights have moved since.
        """
        from specmla.kernels.experts import MANY_PAIRS, experts_linear, make_tiles

        if self._addresses() != self._at:
            raise ArgumentError("the experts' weights have moved; group the experts again")
        per_token, flat = chosen.shape[1], chosen.flatten()
        order = flat.argsort(stable=True)
        block = MANY_PAIRS if batch_invariant else None
        tiles = make_tiles(flat, self.num_experts, block)
        sorted_pairs = torch.arange(order.shape[0], device=order.device)
        token = order.div(per_token, rounding_mode="floor")
        inner = experts_linear(rows, self._gate, self._up, token, sorted_pairs, tiles)
        by_pair = experts_linear(inner, self._down, None, sorted_pairs, order, tiles)
        by_token = by_pair.unflatten(0, (-1, per_token))
        return sum_pairs(by_token, weights, batch_invariant=batch_invariant)

    def _addresses(self) -> list[int]:
        """Where the first and last weights lie: all are moved together or none."""
        return [linear.weight.data_ptr() for linear in self._ends]


def group_experts(model: nn.Module) -> int:
    """Let all expert layers of a model run grouped from here on; gives their number.

    Call it after the model has its device and dtype: weights may be written in place afterwards
    (`reload_checkpoint`), but not moved.

    Raises:
        UnsupportedError: Triton is missing.
        ArgumentError: weights that can't be taken.
    """
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError("group_experts", ["the package triton is not installed"])
    layers = [module for module in model.modules() if isinstance(module, DeepseekMoE)]
    for layer in layers:
        layer.grouped = GroupedExperts([e for e in layer.experts if isinstance(e, DeepseekMLP)])
    return len(layers)


def _weights(weights: Sequence[Tensor]) -> ExpertWeights:
    from specmla.kernels.experts import ExpertWeights
    from specmla.kernels.move import LayerTable

    forms = {(tuple(w.shape), w.stride(), w.dtype, w.device) for w in weights}
    first = weights[0]
    accepted = (torch.bfloat16, torch.float16, torch.float32)
    found = [] if len(forms) == 1 else [f"experts have {len(forms)} forms of weights, not one"]
    if not first.is_contiguous() or first.dtype not in accepted:
        found.append(
            f"weights are {first.dtype} with strides {first.stride()}, accepted are contiguous "
            f"ones of {[str(d) for d in accepted]}"
        )
    require(found, "GroupedExperts")
    return ExpertWeights(*LayerTable.of([weight.detach() for weight in weights]))
