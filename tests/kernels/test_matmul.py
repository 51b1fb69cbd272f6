"""Products and norms of rows: right, and each row's bits its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.chunks import KEY_STEP
from specmla.errors import ArgumentError
from specmla.kernels.launch import describe_device, launch_table
from specmla.kernels.matmul import find_tile, matmul_rows
from specmla.row_local import Linear, RMSNorm, multiply, multiply_heads
from specmla.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("dots_by_row")

DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)
# Rows, heads, inner, width: less than a tile, whole tiles, a rest in each direction.
SHAPES = [(1, 1, 16, 8), (3, 5, 12, 40), (65, 1, 300, 130), (64, 2, 128, 128), (130, 1, 129, 33)]


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_err_like_torch(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rows, heads, inner, width = shape
    x = draw(rows, heads, inner + 3, dtype=dtype, device=device)[..., :inner]
    # As absorption has it: heads that don't follow each other, columns contiguous; and the lift.
    stored = draw(heads, inner + 2, width, dtype=dtype, device=device, seed=1)[:, :inner]
    for weight in (stored, stored.transpose(1, 2).contiguous().transpose(1, 2)):
        plain = torch.einsum("thi,hio->tho", x, weight)
        exact = torch.einsum("thi,hio->tho", x.double(), weight.double())
        got = multiply_heads(x, weight)
        assert got.is_contiguous()
        assert got.dtype is dtype
        assert_within_budget(got, exact, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_anywhere_and_beside_nan(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Also in the last rows of a tile, and where the batch has another stride."""
    x = draw(150, 70, dtype=dtype, device=device)
    weight, bias = (draw(*s, dtype=dtype, device=device, seed=1) for s in ((90, 70), (90,)))
    whole = multiply(x, weight, bias)
    for row in (0, 63, 64, 149):
        assert torch.equal(multiply(x[row : row + 1], weight, bias)[0], whole[row])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(multiply(x[order], weight, bias), whole[order])
    wide = torch.full((9, 3, 80), torch.nan, dtype=dtype, device=device)
    wide[4, 1, :70] = x[100]
    got = multiply(wide[:, 1, :70], weight, bias)
    assert torch.equal(got[4], whole[100])
    assert got[3].isnan().all()


def test_modules_and_empty_batches(device: torch.device) -> None:
    linear, norm = Linear(24, 40).to(device), RMSNorm(24, eps=1e-6).to(device)
    torch.nn.init.normal_(norm.weight)
    rows = draw(2, 7, 24, dtype=torch.float32, device=device)
    linear.requires_grad_(False), norm.requires_grad_(False)
    with torch.no_grad():
        plain = linear(rows), norm(rows)
        linear.batch_invariant = norm.batch_invariant = True
        got = linear(rows), norm(rows)
        assert linear(rows[:, :0]).shape == (2, 0, 40)
        assert norm(rows[:, :0]).shape == (2, 0, 24)
    exact = rows.double() @ linear.weight.double().t() + linear.bias.double()
    assert_within_budget(got[0], exact, plain[0])
    size = (rows.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_within_budget(got[1], rows.double() / size * norm.weight.double(), plain[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_a_row_s_own(dtype: torch.dtype, device: torch.device) -> None:
    norm = RMSNorm(200, eps=1e-6).to(device, dtype).requires_grad_(False)
    norm.batch_invariant = True
    rows = draw(40, 220, dtype=dtype, device=device) * 30
    rows[7] = torch.nan
    whole = norm(rows[:, :200])
    assert torch.equal(norm(rows[5:6, :200].contiguous())[0], whole[5])
    assert torch.equal(norm(rows[20:, :200]), whole[20:])


def test_one_tile_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    seen = []
    from specmla.kernels import matmul

    launch = matmul.MATMUL.launch
    monkeypatch.setattr(
        matmul.MATMUL,
        "launch",
        lambda grid, *a, **n: (seen.append((grid, n)), launch(grid, *a, **n)),
    )
    weight = draw(1, 32, 48, dtype=torch.float32, device=device)
    for rows in (1, 64, 65, 200):
        matmul_rows(draw(rows, 1, 32, dtype=torch.float32, device=device), weight)
    assert len({tuple(named.items()) for _, named in seen}) == 1
    assert [grid[0] for grid, _ in seen] == [
        -(-rows // find_tile(describe_device(device).arch, 4).rows) for rows in (1, 64, 65, 200)
    ]


def test_folded_chunks_end_at_whole_blocks() -> None:
    entries = [e for kernels in launch_table().values() for e in kernels["fold"]]
    assert all(KEY_STEP % e.block_n == 0 for e in entries)


def test_what_is_refused(device: torch.device) -> None:
    rows = torch.zeros(2, 4, dtype=torch.float64, device=device)
    with pytest.raises(
        ArgumentError,
        match=r"rows are torch.float64, the weight torch.float32.*"
        r"dtype is torch.float64, accepted are",
    ):
        multiply(rows, torch.zeros(3, 4, device=device))
