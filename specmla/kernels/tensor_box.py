"""A tensor that a kernel reads through a tensor map, box by box."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor


class TensorBox:
    """What a tensor map copies at once; equal to itself alone, so that it is a cheap key.

    Args:
        block: elements of a box along each axis.
        layout: how the box lies in shared memory (a Gluon layout).
    """

    __slots__ = ("block", "layout")

    def __init__(self, block: tuple[int, ...], layout: Any) -> None:
        self.block, self.layout = block, layout


@lru_cache(maxsize=64)
def tensor_box(block: tuple[int, ...], layout: Any) -> TensorBox:
    """Give the one box of this shape and layout."""
    return TensorBox(block, layout)


class BoxedTensor(NamedTuple):
    """An argument of a kernel: a tensor whose address and strides in bytes 16 divides, and how it
    is read."""

    tensor: Tensor
    box: TensorBox

    def descriptor(self) -> Any:
        """Give what Triton's own launch takes."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        shape, strides = list(self.tensor.shape), list(self.tensor.stride())
        return TensorDescriptor(self.tensor, shape, strides, list(self.box.block), self.box.layout)
