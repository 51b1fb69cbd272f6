"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

POISONED = {"kernels", "backends", "cache", "gpu"}


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised memory with NaN, so that a value that nobody wrote shows."""
    if request.node.path.parent.name not in POISONED:
        return

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = allocate(*args, **kwargs)
            if out.is_floating_point():
                out.detach().fill_(float("nan"))  # a leaf that requires grad may not be written
            return out

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def dots_by_row() -> Iterator[None]:
    """Compare bits of batch-invariant kernels under the interpreter, whatever CPU this is."""
    from specmla.testing.interpreted_dots import dots_by_row

    with dots_by_row():
        yield
