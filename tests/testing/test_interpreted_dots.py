"""Rows of interpreted products that don't depend on their place."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import language as tl
from triton.runtime import interpreter

from specmla.testing import dots_by_row

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where there is a GPU"
)


@triton.jit
def dot_kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    i, k, j = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    at = out_ptr + i[:, None] * N + j[None, :]
    a = tl.load(a_ptr + i[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + j[None, :])
    tl.store(at, tl.dot(a, b, tl.load(at), input_precision="ieee"))


def dot(a: torch.Tensor, b: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    out = add.clone()
    dot_kernel[(1,)](out, a, b, M=len(a), K=len(b), N=b.shape[1])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_place(dtype: torch.dtype) -> None:
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype)
    add = torch.randn(32, 16)
    with dots_by_row():
        want = dot(a, b, add)
        for shift in range(1, 32):
            turned = dot(a.roll(shift, 0), b, add.roll(shift, 0))
            assert torch.equal(turned.roll(-shift, 0), want)
    exact = a.double() @ b.double() + add
    # 64 products and sums of float32, of factors below 5.
    torch.testing.assert_close(want.double(), exact, rtol=0, atol=64 * 25 * 2**-23)


def test_products_are_of_one_row_until_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes, builder = [], interpreter.InterpreterBuilder
    plain = builder.create_dot

    def noting(self, a, b, d, *options):
        shapes.append((a.data.shape, b.data.shape, d.data.shape))
        return plain(self, a, b, d, *options)

    monkeypatch.setattr(builder, "create_dot", noting)
    given = torch.randn(16, 32), torch.randn(32, 16), torch.zeros(16, 16)
    with dots_by_row():
        dot(*given)
    dot(*given)
    with pytest.raises(RuntimeError), dots_by_row():
        raise RuntimeError
    assert builder.create_dot is noting
    assert shapes == [
        ((16, 1, 32), (1, 32, 16), (16, 1, 16)),
        ((16, 32), (32, 16), (16, 16)),
    ]
