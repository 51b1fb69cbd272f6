"""Sampling parameters of a bucket's requests, in buffers that stay."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from specmla.verify.sampling import SamplingBatch


class HeldSampling:
    """Parameters of at most B requests; one that is not there has those of whoever was there last.

    Args:
        num_requests: B.
    """

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self._held: dict[str, Tensor] = {}
        self._last: SamplingBatch | None = None

    def hold(self, sampling: SamplingBatch) -> SamplingBatch:
        """Give parameters of B requests in the buffers, with the flags of `sampling`."""
        held: dict[str, Any] = {}
        for name, given in _tensors(sampling).items():
            if name not in self._held:
                shape = (self.num_requests, *given.shape[1:])
                self._held[name] = given.new_zeros(shape)
            held[name] = self._held[name]
        return dataclasses.replace(sampling, **held)

    def fill(self, sampling: SamplingBatch) -> None:
        """Write the parameters of the first requests, unless they were the last ones written."""
        if sampling is self._last:
            return
        for name, given in _tensors(sampling).items():
            self._held[name][: len(given)].copy_(given)
        self._last = sampling


def _tensors(sampling: SamplingBatch) -> dict[str, Tensor]:
    """Give the fields that are tensors, [B, ...] each, by name."""
    values = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
