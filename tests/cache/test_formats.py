"""Row formats: bytes written down by hand, sizes, names and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specmla.cache import CacheFormat, CacheLayout, cache_format
from specmla.errors import ArgumentError

C, R = 512, 64
QUANTISED = ["fp8", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"]


def row(places: dict[int, float], width: int) -> torch.Tensor:
    values = torch.zeros(1, width)
    for at, value in places.items():
        values[0, at] = value
    return values.bfloat16()


def stored(format: CacheFormat, latent: dict[int, float], rope: dict[int, float]) -> bytes:
    got = format.quantise(row(latent, C), row(rope, R))
    assert got.dtype is torch.uint8
    assert got.shape == (1, format.bytes_per_row)
    return bytes(got[0].tolist())


def spread(size: int, places: dict[int, Sequence[int]]) -> bytes:
    """`size` bytes, zero but for the runs given by their first place."""
    out = bytearray(size)
    for at, run in places.items():
        out[at : at + len(run)] = bytes(run)
    return bytes(out)


def test_bytes_of_an_fp8_row() -> None:
    latent = {0: 1.0, 1: -1.0, 2: 448.0, 3: 2.0**-9, 4: 257.0, 5: 1e30, 511: -0.25}
    expected = {0: [0x38, 0xB8, 0x7E, 0x01, 0x78, 0x7E], 511: [0xA8], 512: [0x40], 575: [0x30]}
    got = stored(cache_format("fp8", C, R), latent, {0: 2.0, 63: 0.5})
    assert got == spread(576, expected)
    halved = cache_format("fp8", C, R, k_scale=0.5)  # codes are those of twice the value
    assert stored(halved, {0: 0.5, 511: -0.125}, {0: 1.0, 63: 0.25}) == spread(
        576, {0: [0x38], 511: [0xA8], 512: [0x40], 575: [0x30]}
    )


def test_bytes_of_an_fp8_ds_mla_row() -> None:
    # Largest of the groups: 448, 7, nothing, 896; so scales 1, 2^-6, 2^-100 and 2.
    latent = {0: 448.0, 127: 1.0, 128: 7.0, 129: -3.5, 384: 896.0, 511: -2.0}
    scales = [0, 0, 0x80, 0x3F, 0, 0, 0x80, 0x3C, 0, 0, 0x80, 0x0D, 0, 0, 0, 0x40]
    expected = {0: [0x7E], 127: [0x38], 128: [0x7E, 0xF6], 384: [0x7E], 511: [0xB8], 512: scales}
    expected |= {528: [0x80, 0x3F], 654: [0x00, 0xC0]}  # 1 and -2 in bf16
    got = stored(cache_format("fp8_ds_mla", C, R), latent, {0: 1.0, 63: -2.0})
    assert got == spread(656, expected)


def test_bytes_of_an_fp8_per_token_head_row() -> None:
    latent = {0: 896.0, 511: -2.0}  # the largest of all 576 is 896: scale 2
    expected = {0: [0x7E], 511: [0xB8], 512: [0x38], 576: [0, 0, 0, 0x40, 0, 0, 0, 0x40]}
    got = stored(cache_format("fp8_per_token_head", C, R), latent, {0: 2.0})
    assert got == spread(584, expected)


def test_bytes_of_an_nvfp4_ds_mla_row() -> None:
    # Groups of 16: largest 6 and scale 1, largest 12 and scale 2, the rest 0 and scale 2^-6.
    latent = {0: 6.0, 1: -0.5, 2: 1.0, 3: 2.0, 16: -12.0, 17: 3.0}
    scales = [0x38, 0x40] + [0x08] * 30
    expected = {0: [0x97, 0x42], 8: [0x3F], 256: [0x38], 319: [0xB8], 320: scales}
    got = stored(cache_format("nvfp4_ds_mla", C, R), latent, {0: 1.0, 63: -1.0})
    assert got == spread(352, expected)


def test_bytes_of_a_plain_row() -> None:
    got = cache_format("bf16", C, R).quantise(row({0: 1.0}, C), row({63: -2.0}, R))
    expected = spread(1152, {0: [0x80, 0x3F], 1150: [0x00, 0xC0]})
    assert bytes(got.view(torch.uint8)[0].tolist()) == expected


@pytest.mark.parametrize(
    ("name", "row_bytes", "alignment"),
    [
        ("bf16", 1152, 2),
        ("fp16", 1152, 2),
        ("fp32", 2304, 4),
        ("fp8", 576, 1),
        ("fp8_ds_mla", 656, 4),
        ("fp8_per_token_head", 584, 4),
        ("nvfp4_ds_mla", 352, 1),
    ],
)
def test_sizes_of_deepseek_rows(name: str, row_bytes: int, alignment: int) -> None:
    format = cache_format(name, C, R)
    assert (format.bytes_per_row, format.alignment) == (row_bytes, alignment)
    assert format.bytes_per_page(64) == 64 * row_bytes
    layout = CacheLayout(format.width, format.dtype, 128, format)
    assert layout.bytes_per_pool(10, num_layers=61) == 61 * 10 * 128 * row_bytes
    at = 0
    for part in format.parts:  # in order, without gaps, aligned for their elements
        assert part.offset == at
        assert part.offset % part.dtype.itemsize == 0
        at += part.num_bytes
    assert at == row_bytes
    held = {part.name: part.count * part.per_element for part in format.parts}
    assert (held["latent"], held["rope"]) == (C, R)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fp8_e5m2", "two mantissa bits"),
        ("e5m2", "two mantissa bits"),
        ("mxfp8_ds_mla", "528 bytes"),
        ("nvfp4", "288 bytes"),
        ("int8", "accepted are .*fp8_ds_mla"),
    ],
)
def test_other_formats_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        cache_format(name, C, R)


@pytest.mark.parametrize("name", ["bf16", *QUANTISED])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-50])
def test_scales_that_are_no_scales_are_refused(name: str, bad: float) -> None:
    with pytest.raises(ArgumentError, match=f"k_scale is {bad}"):
        cache_format(name, C, R, k_scale=bad)


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf])
def test_both_scales_are_judged(bad: float) -> None:
    with pytest.raises(ArgumentError, match=f"k_scale is {bad}.*v_scale is {bad}"):
        cache_format("fp8", C, R, k_scale=bad, v_scale=bad)


@pytest.mark.parametrize("name", ["bf16", *QUANTISED])
@pytest.mark.parametrize("bad", ["1", None, True, torch.tensor(0.5)], ids=repr)
def test_scales_that_are_no_numbers_are_refused(name: str, bad: Any) -> None:
    """A tensor too: it may change, and neither compares nor hashes as a format must."""
    with pytest.raises(ArgumentError, match=rf"k_scale is {re.escape(repr(bad))}, accepted are"):
        cache_format(name, C, R, k_scale=bad)
    if bad is not None:
        with pytest.raises(ArgumentError, match=rf"v_scale is {re.escape(repr(bad))}, accepted"):
            cache_format(name, C, R, v_scale=bad)


@pytest.mark.parametrize("name", QUANTISED)
def test_dtypes_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"dtype is bf16, accepted are .*torch\.bfloat16"):
        cache_format(name, C, R, dtype="bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp8", "nvfp4_ds_mla"])
def test_an_equal_scale_for_values_makes_no_other_format(name: str) -> None:
    """A cache whose checkpoint gives both and a backend that was given one go together."""
    both = cache_format(name, C, R, k_scale=0.5, v_scale=0.5)
    assert both == cache_format(name, C, R, k_scale=0.5)
    assert both != cache_format(name, C, R, k_scale=0.25)


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4_ds_mla"])
def test_another_scale_for_values_is_refused(name: str) -> None:
    """BL-45: there is one latent; an absent v_scale is the same one, an equal one is accepted."""
    with pytest.raises(ArgumentError, match=r"v_scale is 2.0 and k_scale 0.5"):
        cache_format(name, C, R, k_scale=0.5, v_scale=2.0)
    cache_format(name, C, R, k_scale=0.5, v_scale=0.5)
    cache_format(name, C, R, k_scale=0.5)


def test_a_plain_cache_is_not_scaled() -> None:
    """BL-45: a checkpoint's scale changes no bit of an unquantised cache."""
    assert cache_format("bf16", C, R, k_scale=0.5) == cache_format("bf16", C, R)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_per_token_head"])
def test_rows_with_scales_of_their_own_take_no_other(name: str) -> None:
    with pytest.raises(ArgumentError, match="carry their own"):
        cache_format(name, C, R, k_scale=0.5)


def test_a_scale_that_overflows_or_is_rounded_is_refused() -> None:
    cache_format("fp8", C, R, dtype=torch.float16, k_scale=128.0)
    with pytest.raises(ArgumentError, match=r"k_scale is 256.0.*without overflow"):
        cache_format("fp8", C, R, dtype=torch.float16, k_scale=256.0)
    with pytest.raises(ArgumentError, match=r"accepted are float32 values such as 0\.1000000014"):
        cache_format("fp8", C, R, k_scale=0.1)


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(ArgumentError) as error:
        cache_format("nvfp4_ds_mla", 24, -1, dtype=torch.int8, k_scale=-1.0, v_scale=0.0)
    for part in (
        "kv_lora_rank is 24",
        "multiples of 16",
        "qk_rope_head_dim is -1",
        "dtype is torch.int8",
        "k_scale is -1.0",
        "v_scale is 0.0",
    ):
        assert part in str(error.value)
    with pytest.raises(ArgumentError) as error:
        cache_format("fp8_ds_mla", 100, 7, k_scale=2.0)
    for part in ("kv_lora_rank is 100", "multiples of 128", "qk_rope_head_dim is 7", "k_scale"):
        assert part in str(error.value)
    with pytest.raises(ArgumentError, match="multiples of 4"):
        cache_format("fp8_per_token_head", 512, 2)
    with pytest.raises(ArgumentError, match=r"accepted is torch\.float16"):
        cache_format("fp16", C, R, dtype=torch.bfloat16)
