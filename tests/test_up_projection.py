"""Absorb and lift: what they give, in which memory, and that nothing is copied on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specmla.config import MLAConfig
from specmla.up_projection import UpProjection

VIEWS = ("transpose", "view", "split", "unflatten", "slice")


class Names(TorchDispatchMode):
    """Notes what is called beside views."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if not name.startswith(VIEWS):
            self.busy.append(name)
        return func(*args, **(kwargs or {}))


def make(num_heads: int, dtype: torch.dtype) -> UpProjection:
    torch.manual_seed(0)
    made = UpProjection(MLAConfig(24, num_heads, 48, 20, 8, 12)).to(dtype)
    with torch.no_grad():
        made.weight.normal_()
    return made


def draw(rows: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows with gaps between heads, as a query is split."""
    torch.manual_seed(1)
    return torch.randn(rows, heads, width + 3).to(dtype)[..., :width]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [1, 3, 16])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_lift_puts_the_product_of_each_head_in_its_place(
    rows: int, num_heads: int, dtype: torch.dtype
) -> None:
    made, latent = make(num_heads, dtype), draw(rows, num_heads, 48, dtype)
    with torch.no_grad():
        got = made.lift(latent)
    assert got.is_contiguous()
    assert got.shape == (rows, num_heads * 12)
    w_uv = made.weight.detach().double().view(num_heads, 32, 48)[:, 20:]
    want = torch.einsum("thc,hvc->thv", latent.double(), w_uv).flatten(1)
    eps = torch.finfo(dtype).eps
    for lifted in (got, made.lift(latent.contiguous().requires_grad_())):  # another product
        torch.testing.assert_close(lifted.double(), want, rtol=eps, atol=48 * 10 * eps)


def test_neither_copies_without_gradients() -> None:
    made, query = make(16, torch.float32), draw(7, 16, 20, torch.float32)
    with torch.no_grad(), Names() as names:
        made.lift(made.absorb(query))
    assert names.busy == ["bmm.default", "new_empty.default", "bmm.out"]


def test_lift_has_gradients_where_they_are_asked_for() -> None:
    made, latent = make(3, torch.float64), draw(2, 3, 48, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(made.lift, (latent,))
