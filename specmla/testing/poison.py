"""Uninitialised memory that shows: whatever an allocation leaves unwritten is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


class PoisonedMemory(TorchDispatchMode):
    """Fill every new floating-point tensor with NaN before its owner sees it.

    Outputs and scratch of a backend that allocates through torch then hold NaN until something is
    written, so that a row that was skipped can't pass for zeros by luck.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # not super(): untyped in torch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; fill what an allocation gives."""
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS and made.is_floating_point():
            made.fill_(float("nan"))
        return made
