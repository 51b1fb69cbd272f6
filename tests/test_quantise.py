"""Output codes against a search of all codes in float64; zeros, infinities, NaN, ties, edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specmla.quantise import quantise_groups, quantise_nvfp4, quantise_static

E4M3 = torch.float8_e4m3fn
F32_MAX = torch.finfo(torch.float32).max
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# The finite codes, in order of their bits: code 127 (and 255) is NaN.
E4M3_CODES = torch.arange(127, dtype=torch.uint8).view(E4M3).double().tolist()


def nearest(value: float, codes: list[float]) -> int:
    """Search the code nearest to |value|, the even one of two."""
    size = min(abs(value), codes[-1])
    distance = [abs(size - code) for code in codes]
    best = min(distance)
    return min((i for i, d in enumerate(distance) if d == best), key=lambda i: i % 2)


def divide(a: float, b: float) -> float:
    """Divide as float32 does: the float64 quotient of float32 numbers rounds to the same."""
    return torch.tensor(a / b, dtype=torch.float64).float().item()


def e4m3(value: float) -> float:
    return math.copysign(E4M3_CODES[nearest(value, E4M3_CODES)], value)


def groups_by_hand(row: list[float], group: int) -> tuple[list[float], list[float]]:
    codes, scales = [], []
    for first in range(0, len(row), group):
        part = row[first : first + group]
        largest = torch.tensor(max(1e-10, *map(abs, part))).item()
        scales.append(divide(largest, 448.0))
        codes += [e4m3(divide(x, scales[-1])) for x in part]
    return codes, scales


def nvfp4_by_hand(row: list[float], scale: float) -> tuple[list[int], list[float]]:
    codes, blocks = [], []
    for first in range(0, len(row), 16):
        part = row[first : first + 16]
        six = torch.tensor(6.0 * scale, dtype=torch.float64).float().item()
        blocks.append(e4m3(divide(max(map(abs, part)), six)))
        step = torch.tensor(blocks[-1] * scale, dtype=torch.float64).float().item()
        for x in part:
            code = nearest(divide(x, step), E2M1) + 8 * (x < 0) if step else 0
            codes.append(code)
    return codes, blocks


def make_rows(dtype: torch.dtype, width: int = 384, rows: int = 6) -> Tensor:
    """Groups of very different sizes, a row of zeros, ties and group borders that matter."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.logspace(-6, 6, width // 16).repeat_interleave(16)[:width]
    x[1] = 0.0
    x[2, ::2] = 0.0
    # The largest of a group on its last and on its first value.
    x[3] = 0.01
    x[3, 63], x[3, 64], x[3, 127], x[3, 128] = 1.0, 30.0, -7.0, 1e4
    x[4] = torch.arange(width) / 16.0 - 8.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [64, 128])
def test_groups_equal_a_search(dtype: torch.dtype, group: int) -> None:
    rows = make_rows(dtype)
    rows[rows.isinf()] = 1.0  # float16; infinities have a test of their own
    codes, scale = quantise_groups(rows, group)
    assert codes.dtype == E4M3
    assert scale.dtype == torch.float32
    for row, got, got_scale in zip(rows, codes, scale, strict=True):
        want, want_scale = groups_by_hand(row.tolist(), group)
        assert got.tolist() == want
        assert got_scale.tolist() == want_scale


@pytest.mark.parametrize("scale", [1.0, 0.0123, 7.0e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_static_equals_a_search(dtype: torch.dtype, scale: float) -> None:
    rows, given = make_rows(dtype), torch.tensor([scale])
    want = [[e4m3(divide(x, given.item())) for x in row] for row in rows.tolist()]
    assert quantise_static(rows, given).tolist() == want


@pytest.mark.parametrize("scale", [1.0, 0.0123, 40.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_equals_a_search(dtype: torch.dtype, scale: float) -> None:
    rows, given = make_rows(dtype), torch.tensor(scale)
    packed, block = quantise_nvfp4(rows, given)
    assert packed.dtype == torch.uint8
    assert block.dtype == E4M3
    assert packed.shape == (6, 192)
    low, high = packed & 15, packed >> 4
    codes = torch.stack((low, high), dim=-1).flatten(1)
    for row, got, got_block in zip(rows, codes, block, strict=True):
        want, want_block = nvfp4_by_hand(row.tolist(), given.item())
        assert got_block.tolist() == want_block
        assert got.tolist() == want


def test_overflow_saturates_and_ties_go_to_even() -> None:
    """Values of the upper exponent, which have been lost to a test one exponent too early."""
    values = torch.tensor([[257.0, 272, 300, 304, 336, 400, 431, 440, 449, 1000]])
    want = [256, 256, 288, 320, 320, 384, 416, 448, 448, 448]
    one = torch.ones(())
    assert quantise_static(values, one).tolist() == [want]
    assert quantise_static(-values, one).tolist() == [[-w for w in want]]
    halves = torch.tensor(
        [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, 0.26, -0.74, 0, 6, 6, 6]]
    )
    packed, block = quantise_nvfp4(halves, one)
    assert block.tolist() == [[1.0]]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten().tolist()
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 14, 1, 9, 0, 7, 7, 7]


def test_rows_of_zeros() -> None:
    rows = torch.zeros(3, 128, dtype=torch.bfloat16)
    rows[2] = -0.0
    for group in (64, 128):
        codes, scale = quantise_groups(rows, group)
        assert not codes.float().any()
        assert (scale == torch.tensor(1e-10) / 448).all()
    assert not quantise_static(rows, torch.tensor(3.0)).float().any()
    packed, block = quantise_nvfp4(rows, torch.tensor(0.1))
    assert not packed.any()
    assert not block.float().any()


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-30])
def test_tiny_groups_divide_by_no_zero(value: float) -> None:
    rows = torch.full((1, 128), value)
    codes, scale = quantise_groups(rows, 128)
    assert not codes.float().isnan().any()
    assert (codes.float() * scale).max() <= 2 * value + 1e-14
    for whole in (1e-45, 1e-38, 1.0, 3e38):
        packed, block = quantise_nvfp4(rows, torch.tensor(whole))
        step = block.float() * torch.tensor(whole)
        codes = packed.flatten() & 15
        assert not step.isnan().any()
        assert torch.all((codes < 8) & ((codes == 0) | (step.flatten()[0] >= 0)))


def test_infinities_saturate() -> None:
    rows = torch.ones(2, 128, dtype=torch.bfloat16)
    rows[0, 5], rows[0, 70] = math.inf, -math.inf
    codes, scale = quantise_groups(rows, 64)
    assert not codes.float().isnan().any()
    assert scale.isfinite().all()
    assert codes[0, 5].item() == 448
    assert codes[0, 70].item() == -448
    assert codes[0].float().count_nonzero() == 2  # beside them one is nothing
    assert (codes[1].float() * scale[1, 0] - 1).abs().max() < 2**-20
    static = quantise_static(rows, torch.tensor(1.0))
    assert static[0, 5].item() == 448
    assert static[0, 70].item() == -448
    packed, block = quantise_nvfp4(rows, torch.tensor(1.0))
    assert block[0, 0].item() == block[0, 4].item() == 448
    assert packed[0, 2].item() >> 4 == 7  # value 5 is odd
    assert packed[0, 35].item() & 15 == 15


def test_nan_stays_visible() -> None:
    rows = torch.ones(2, 128, dtype=torch.bfloat16)
    rows[0, 64] = math.nan
    assert quantise_static(rows, torch.tensor(1.0)).float().isnan().nonzero().tolist() == [[0, 64]]
    assert quantise_groups(rows, 64)[1].isnan().nonzero().tolist() == [[0, 1]]
    block = quantise_nvfp4(rows, torch.tensor(1.0))[1]
    assert block.float().isnan().nonzero().tolist() == [[0, 4]]


def test_wide_rows_of_float64() -> None:
    rows = torch.full((1, 64), 1e300, dtype=torch.float64)
    codes, scale = quantise_groups(rows, 64)
    assert scale.item() == pytest.approx(F32_MAX / 448)
    assert (codes.float() == 448).all()
