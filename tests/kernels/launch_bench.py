"""A kernel whose launches are written down in place of being run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import JITFunction
from triton.language import constexpr

from specmla.kernels import direct, prepared
from specmla.kernels.direct import DirectKernel
from specmla.kernels.raw_launcher import RawStart

MEMORY = torch.zeros(512, dtype=torch.bfloat16)
NAMED = {"N": 64, "num_warps": 4}


def _body(x, y, scale, stride, N: constexpr):  # type: ignore[no-untyped-def]
    pass


class Bench:
    """The kernel, the launches that went through Triton, and the direct ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.stream = 0, 7
        self.through_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.startable = True
        active = SimpleNamespace(
            get_current_device=lambda: self.device, get_current_stream=lambda d: (d, self.stream)
        )
        monkeypatch.setattr(direct, "driver", SimpleNamespace(active=active))
        for module in (direct, prepared):
            monkeypatch.setattr(module, "current_stream", lambda: (self.device, self.stream))
        monkeypatch.setattr(direct, "find_start", self.find_start)
        self.jitted = JITFunction(_body)
        self.jitted.run = self.run  # type: ignore[method-assign]
        self.kernel = DirectKernel(self.jitted)

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> object:
        self.through_triton.append((grid, args, named))
        return SimpleNamespace(number=len(self.through_triton))

    def find_start(self, compiled: Any, boxes: Sequence[int], tail: int) -> RawStart | None:
        def call(grid: Any, stream: Any, args: list[Any]) -> None:
            self.direct.append((compiled.number, grid, stream, args))

        def make_map(*of: Any) -> tuple[Any, ...]:
            return ("map", *of)

        return RawStart(call, [(i, make_map) for i in boxes], tail) if self.startable else None

    def launch(self, x: Any = MEMORY, y: Any = MEMORY, stride: Any = 64, **named: Any) -> int:
        """Launch; give how many calls have gone through Triton."""
        self.kernel.launch((3,), x, y, 0.5, stride, **(NAMED | named))
        return len(self.through_triton)
