"""Attention of further layers over one plan: what was checked and chosen for one holds for all.

Layers of a model differ in the addresses of their tensors alone. Their shapes, strides, dtypes and
devices are compared with those of the first call, so that nothing else has to be looked at again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specmla.kernels.direct import Started
from specmla.kernels.prepared import Launch, PreparedLaunches, prepare
from specmla.kernels.tensor_box import BoxedTensor
from specmla.metadata import VerifyPart

ALIGNMENT = 16


class RepeatedAttention:
    """Remembers the last call on a plan and repeats it with other tensors."""

    def __init__(self) -> None:
        self._launches: PreparedLaunches | None = None

    def remember(
        self,
        launches: Sequence[Launch],
        started: Sequence[Started | None],
        inputs: tuple[Tensor, Tensor, BoxedTensor],
        outputs: tuple[Tensor, Tensor],
        part: VerifyPart,
        softmax_scale: float,
    ) -> None:
        """Take a call that has been checked and started.

        Args:
            launches, started: of the call, as for `prepare`.
            inputs: q_latent, q_rope and the cache among their arguments.
            outputs: latents and LSE among them.
            part: of the step; its tables and its plan keep their memory.
            softmax_scale: of the call.
        """
        self._launches = None
        q_latent, q_rope, cache = inputs
        tensors = (q_latent, q_rope, cache.tensor, *outputs)
        if any(type(t) is not Tensor or t.data_ptr() % ALIGNMENT for t in tensors):
            return
        self._part, self._scale = weakref.ref(part), softmax_scale
        self._like = _properties(q_latent, q_rope, cache.tensor)
        self._device = q_latent.device.index
        self._shapes = [tuple(t.shape) for t in outputs]
        self._floats = outputs[1].new_empty(0)
        self._launches = prepare(launches, started, (*inputs, *outputs))

    def attend(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor] | None:
        """Repeat the call for these tensors; None if it would be another call."""
        launches = self._launches
        if (
            launches is None
            or part is not self._part()
            or softmax_scale != self._scale
            or _properties(q_latent, q_rope, latent_cache) != self._like
            or torch.cuda.current_device() != self._device
            or not launches.is_free
        ):
            return None
        addresses = [q_latent.data_ptr(), q_rope.data_ptr(), latent_cache.data_ptr()]
        if (addresses[0] | addresses[1] | addresses[2]) % ALIGNMENT:
            return None
        out, lse = q_latent.new_empty(self._shapes[0]), self._floats.new_empty(self._shapes[1])
        addresses += out.data_ptr(), lse.data_ptr()
        if (addresses[3] | addresses[4]) % ALIGNMENT:
            return None
        launches.start(addresses)
        return out, lse


def _properties(*tensors: Tensor) -> list[Any]:
    """All that a call is checked for and compiled for, but alignment."""
    found: list[Any] = []
    for t in tensors:
        found += type(t), t.shape, t.stride(), t.dtype, t.device
    return found
