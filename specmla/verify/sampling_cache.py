"""Keeps the last step's sampling tensors while the same parameters run in the same order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specmla.verify.sampling import SamplingBatch, SamplingParams


class SamplingCache:
    """Gives `SamplingBatch.build(params, device)`, built anew only when the parameters change."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._params: tuple[SamplingParams, ...] | None = None
        self._batch: SamplingBatch | None = None

    def get(self, params: Iterable[SamplingParams]) -> SamplingBatch:
        """Give the tensors of these parameters, in this order."""
        wanted = tuple(params)
        if self._batch is None or wanted != self._params:
            self._params, self._batch = wanted, SamplingBatch.build(wanted, self.device)
        return self._batch
