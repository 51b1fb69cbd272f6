"""Rounding, saturation, NaN, the error that a mantissa allows, and second stores."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from specmla.cache import CacheFormat, cache_format
from specmla.cache.formats.e4m3 import decode_e4m3, dynamic_scale, encode_e4m3
from specmla.cache.formats.nvfp4_ds_mla import decode_e2m1, encode_e2m1

C, R = 256, 64
FORMATS = ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla", "nvfp4-scaled"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(name: str, dtype: torch.dtype = torch.float32) -> CacheFormat:
    kind = {"fp8-scaled": "fp8", "nvfp4-scaled": "nvfp4_ds_mla"}.get(name, name)
    scale = 3 * 2.0**-9 if kind != name else 1.0
    return cache_format(kind, C, R, dtype=dtype, k_scale=scale)


def e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    size = mantissa * 2.0**-9 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


def rounds_to_nearest_even(encode, values: list[float], first_negative: int) -> None:
    """Ties, their neighbours and the codes themselves, both signs, for codes in rising order."""
    for code, (low, high) in enumerate(pairwise(values)):
        middle = torch.tensor((low + high) / 2)  # exact: one more bit than a code has
        below, above = (middle.nextafter(torch.tensor(x)) for x in (low, high))
        even = code if code % 2 == 0 else code + 1
        given = torch.stack([torch.tensor(low), below, middle, above, torch.tensor(high)])
        expected = [code, code, even, code + 1, code + 1]
        assert encode(given).tolist() == expected
        assert encode(-given).tolist() == [first_negative + code for code in expected]


def test_e4m3_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e4m3(codes, torch.float32)
    for code, value in enumerate(values.tolist()):
        expected = e4m3_value(code)
        assert value == expected or (math.isnan(value) and math.isnan(expected))
    for dtype in DTYPES:  # every code survives
        assert torch.equal(decode_e4m3(codes, dtype).float()[:127], values[:127])
    rounds_to_nearest_even(encode_e4m3, values[:127].tolist(), 128)


def test_e2m1_codes() -> None:
    values = decode_e2m1(torch.arange(16), torch.float32).tolist()
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    rounds_to_nearest_even(encode_e2m1, values[:8], 8)
    assert encode_e2m1(torch.tensor([7.0, 1e30, math.inf, -math.inf, math.nan])).tolist() == [
        7, 7, 7, 15, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_that_were_once_stored_wrongly(dtype: torch.dtype) -> None:
    """BL-47: the last exponent before saturation is rounded like any other."""
    given = [257, 272, 300, 304, 336, 400, 431, 440, 449, 1000]
    expected = [256, 256, 288, 320, 320, 384, 416, 448, 448, 448]
    format = cache_format("fp8", 10, 10, dtype=dtype)
    latent = torch.tensor([given], dtype=dtype)
    got = format.dequantise(format.quantise(latent, -latent))
    assert got.tolist() == [expected + [-x for x in expected]]


def test_infinities_saturate_in_fp8() -> None:
    format = cache_format("fp8", 2, 2, k_scale=0.5, dtype=torch.float32)
    latent = torch.tensor([[math.inf, -math.inf]])
    rope = torch.tensor([[3e38, -3e38]])
    assert format.dequantise(format.quantise(latent, rope)).tolist() == [[224, -224, 224, -224]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_where_it_was_and_infinities_are_large_numbers(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    latent, rope = (torch.randn(2, width).to(dtype) for width in (C, R))
    latent[0, 5], rope[0, 3] = math.nan, -math.nan
    latent[1, 130], latent[1, 200] = math.inf, -math.inf
    format = made(name, dtype)
    got = format.dequantise(format.quantise(latent, rope))
    bad = torch.zeros(2, C + R, dtype=torch.bool)
    bad[0, slice(0, 16) if name.startswith("nvfp4") else 5] = True
    bad[0, C + 3] = True
    assert torch.equal(got.isnan(), bad)
    assert got[~bad].isfinite().all()
    assert got[1, 130] == got[1, 130].abs() >= got[1].abs().max()
    assert got[1, 200] == -got[1, 130]
    # The rest of a row that holds a NaN is what it is without.
    latent[0, 5], rope[0, 3] = 0.0, 0.0
    clean = format.dequantise(format.quantise(latent, rope))
    assert torch.equal(got[~bad], clean[~bad])


def allowed_error(format: CacheFormat, values: Tensor) -> Tensor:
    """Half a unit of the code that holds each of `values` [T, A] float64, and float32's roundings.

    A code of p significant bits is off by 2^-p of the value, or by half the subnormal step; the
    largest values by no more, since scales map them into the codes' range.
    """
    size, rank = values.abs(), format.kv_lora_rank

    def e4m3(part: Tensor, scale: Tensor | float) -> Tensor:
        return torch.maximum(part * 2.0**-4, torch.as_tensor(scale * 2.0**-10).double())

    latent, rope = size[:, :rank], size[:, rank:]
    scale = getattr(format, "k_scale", 1.0)
    if format.name == "fp8":
        found = e4m3(size, scale)
    elif format.name == "fp8_per_token_head":
        found = e4m3(size, size.amax(1, keepdim=True) / 448)
    elif format.name == "fp8_ds_mla":
        groups = latent.unflatten(1, (-1, 128))
        codes = e4m3(groups, groups.amax(-1, keepdim=True) / 448).flatten(1)
        found = torch.cat([codes, rope * 2.0**-8], 1)  # bf16: 8 significant bits
    else:
        groups = latent.unflatten(1, (-1, 16))
        # Rounded up to 4 significant bits a scale grows by an eighth at most.
        least = torch.as_tensor(scale * 2.0**-6).double()
        group_scale = torch.maximum(groups.amax(-1, keepdim=True) / 6 * 1.125, least)
        codes = torch.maximum(groups, group_scale) / 4
        found = torch.cat([codes.flatten(1), e4m3(rope, scale)], 1)
    return found + size * 2.0**-19  # the scales' 20 bits, and divisions and products in float32


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [2.0**-12, 2.0**-5, 1.0, 2.0**7])
def test_the_error_is_what_the_mantissa_allows(name: str, size: float) -> None:
    torch.manual_seed(0)
    format = made(name)
    limit = 448 * getattr(format, "k_scale", 448.0)
    spread = 2.0 ** torch.randint(-6, 3, (64, C + R))
    values = (torch.randn(64, C + R) * spread * size).clamp(-limit, limit)
    got = format.dequantise(format.quantise(values[:, :C], values[:, C:]), torch.float64)
    error = (got - values.double()).abs()
    allowed = allowed_error(format, values.double())
    assert (error <= allowed).all()
    assert (error > allowed * 0.9).any()  # else the bound would not be the format's


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2.0**-7, 1.0, 100.0])
def test_a_second_store_writes_the_same_bytes(name: str, dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(2)
    format = made(name, dtype)
    values = (torch.randn(300, C + R) * size * 2.0 ** torch.randint(-4, 4, (300, 1))).to(dtype)
    values[7], values[8, :128] = 0, 0
    first = format.quantise(values[:, :C], values[:, C:])
    rows = format.dequantise(first)
    again = format.quantise(rows[:, :C], rows[:, C:])
    assert torch.equal(first, again)
    assert torch.equal(rows, format.dequantise(again))


def test_dynamic_scales_make_448_times_scale_exact() -> None:
    torch.manual_seed(3)
    largest = torch.rand(20_000, 1) * 2.0 ** torch.randint(-60, 60, (20_000, 1))
    scale = dynamic_scale(largest)
    assert torch.equal((scale * 448).double(), scale.double() * 448)
    assert torch.equal(dynamic_scale(scale * 448), scale)
    assert (scale.double() * 448 <= largest.double() * (1 + 2.0**-23)).all()
    assert (scale.double() * 448 >= largest.double() * (1 - 2.0**-19)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zero_bytes_are_zeros(name: str) -> None:
    format = made(name)
    rows = torch.zeros(3, format.bytes_per_row, dtype=torch.uint8)
    assert torch.equal(format.dequantise(rows), torch.zeros(3, C + R))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rope", [0, 64])
def test_no_rows_and_no_rope(name: str, rope: int) -> None:
    format = dataclasses.replace(made(name, torch.bfloat16), qk_rope_head_dim=rope)
    empty = format.quantise(torch.zeros(0, C).bfloat16(), torch.zeros(0, rope).bfloat16())
    assert empty.shape == (0, format.bytes_per_row)
    assert format.dequantise(empty).shape == (0, C + rope)
    six = torch.full((1, C + rope), 6.0 * getattr(format, "k_scale", 1.0)).bfloat16()
    assert torch.equal(format.dequantise(format.quantise(six[:, :C], six[:, C:])), six)
