"""Kernel tests run on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every fresh float tensor NaN, so that what a kernel forgets to write shows."""
    empty, new_empty = torch.empty, Tensor.new_empty

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return filled(empty(*args, **kwargs))

    def new_poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return filled(new_empty(self, *args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(Tensor, "new_empty", new_poisoned)
