"""Kernels of quantised rows: the bytes and numbers of their torch twins, on any data."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

from specmla.cache import LatentCache, cache_format
from specmla.cache.formats.e4m3 import decode_e4m3, dynamic_scale, encode_e4m3
from specmla.cache.formats.nvfp4_ds_mla import decode_e2m1, encode_e2m1
from specmla.kernels import e2m1, e4m3, row_loads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]  # the interpreter truncates to bfloat16
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)
NAMES = ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head"]
NAMES += ["nvfp4_ds_mla", "nvfp4_ds_mla-scaled"]


@triton.jit
def code_kernel(code_ptr, value_ptr, back_ptr, scale_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(value_ptr + at)
    code = e4m3.encode_e4m3(value)
    tl.store(code_ptr + at, code)
    tl.store(back_ptr + at, e4m3.decode_e4m3(code))
    tl.store(scale_ptr + at, e4m3.dynamic_scale(value[:, None]))


def coded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = triton.next_power_of_2(values.numel())
    given_ = torch.zeros(size, device=DEVICE)
    given_[: values.numel()] = values
    code = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    back, scale = torch.zeros_like(given_), torch.zeros_like(given_)
    code_kernel[(1,)](code, given_, back, scale, N=size, enable_fp_fusion=False)
    return tuple(t[: values.numel()] for t in (code, back, scale))  # type: ignore[return-value]


def bits(values: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return values.contiguous().view(kinds[values.element_size()])


def test_codes_are_those_of_torch_for_every_value_that_matters() -> None:
    """All codes, the middles between them, their neighbours, and bit patterns at random."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    exact = decode_e4m3(codes, torch.float32)
    finite = exact[:127]
    middle = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([finite, middle])
    up, down = (near.nextafter(torch.full_like(near, x)) for x in (math.inf, -math.inf))
    odd = torch.tensor([math.inf, math.nan, -math.nan, 448.1, 465.0, 1e38], device=DEVICE)
    torch.manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (4000,), dtype=torch.int64).int().to(DEVICE)
    size = torch.cat([near, up, down, odd, noise.view(torch.float32)])
    values = torch.cat([size, -size])
    got, back, scale = coded(values)
    assert torch.equal(got, encode_e4m3(values))
    expected = decode_e4m3(got, torch.float32)
    assert torch.equal(back.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(bits(back[keep]), bits(expected[keep]))  # negative zeros too
    keep = ~values.isinf()  # those are clamped before
    assert torch.equal(bits(scale[keep]), bits(dynamic_scale(values[keep, None])[:, 0]))
    got, back, _ = coded(exact)
    assert torch.equal(got[keep_codes := ~exact.isnan()], codes[keep_codes])
    assert torch.equal(bits(back[keep_codes]), bits(exact[keep_codes]))


@triton.jit
def small_kernel(value_ptr, code_ptr):
    at = tl.arange(0, 256)
    tl.store(value_ptr + at, row_loads.small_e4m3(tl.load(code_ptr + at)))


def test_codes_in_float16() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    got = torch.zeros(256, dtype=torch.float16, device=DEVICE)
    small_kernel[(1,)](got, codes, enable_fp_fusion=False)
    expected = decode_e4m3(codes, torch.float16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(bits(got[~got.isnan()]), bits(expected[~got.isnan()]))


@triton.jit
def e2m1_kernel(code_ptr, byte_ptr, back_ptr, value_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    code = e2m1.encode_e2m1(tl.load(value_ptr + at))
    tl.store(code_ptr + at, code.to(tl.uint8))
    tl.store(back_ptr + at, e2m1.decode_e2m1(code))
    halves = e2m1.join_halves(tl.reshape(code, [1, N]))
    tl.store(byte_ptr + tl.arange(0, N // 2)[None, :], halves)


def test_e2m1_codes_are_those_of_torch() -> None:
    """Every code, the middles, their neighbours, signed zeros, NaN and what is too large."""
    exact = decode_e2m1(torch.arange(8, device=DEVICE), torch.float32)
    near = torch.cat([exact, (exact[1:] + exact[:-1]) / 2])
    up, down = (near.nextafter(torch.full_like(near, x)) for x in (math.inf, -math.inf))
    odd = torch.tensor([math.inf, math.nan, 7.0, 1e38, 1e-40], device=DEVICE)
    size = torch.cat([near, up, down, odd])
    values = torch.zeros(128, device=DEVICE)
    values[: 2 * size.numel()] = torch.cat([size, -size])
    code = torch.zeros(128, dtype=torch.uint8, device=DEVICE)
    byte, back = torch.zeros_like(code[:64]), torch.zeros_like(values)
    e2m1_kernel[(1,)](code, byte, back, values, N=128, enable_fp_fusion=False)
    expected = encode_e2m1(values)
    assert torch.equal(code, expected)
    assert torch.equal(byte, expected[::2] | expected[1::2] << 4)
    assert torch.equal(bits(back), bits(decode_e2m1(expected, torch.float32)))


@st.composite
def pools(draw: st.DrawFn) -> tuple[str, int, int, int, int, torch.dtype]:
    """name, num_pages, page_size, R, gap, dtype."""
    return (
        draw(st.sampled_from(NAMES)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 5, 16, 64])),
        draw(st.sampled_from([0, 4, 32, 64])),
        draw(st.sampled_from([0, 4, 68])),
        draw(st.sampled_from(DTYPES)),
    )


@given(pool=pools(), rank=st.sampled_from([128, 384]), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_kernels_are_bit_equal_to_their_twins(
    pool: tuple[str, int, int, int, int, torch.dtype], rank: int, seed: int
) -> None:
    name, num_pages, page_size, rope, gap, dtype = pool
    scale = 3 * 2.0**-9 if name.endswith("-scaled") else 1.0
    format = cache_format(name.split("-")[0], rank, rope, dtype=dtype, k_scale=scale)
    size, num_slots = page_size * format.bytes_per_row, num_pages * page_size
    caches = {}
    for impl in ("triton", "torch"):
        whole = torch.full((num_pages, size + gap), 0xFF, dtype=torch.uint8, device=DEVICE)
        view = whole[:, :size].unflatten(1, (page_size, format.bytes_per_row))
        caches[impl] = LatentCache.from_pool([view], impl, format)
    torch.manual_seed(seed)
    count = min(num_slots, 70)
    slots = torch.randperm(num_slots)[:count].to(DEVICE)
    slots[torch.rand(count, device=DEVICE) < 0.2] = -1
    size_of = 2.0 ** torch.randint(-14, 12, (count, 1), device=DEVICE)
    rows = (torch.randn(count, rank + rope + 3, device=DEVICE) * size_of).to(dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-7], device=DEVICE)
    at = torch.rand(rows.shape, device=DEVICE) < 0.002
    rows[at] = special[torch.randint(0, 6, rows.shape, device=DEVICE)][at].to(dtype)
    for cache in caches.values():
        cache.store(0, rows[:, :rank], rows[:, rank : rank + rope], slots)
    ours, twin = (caches[impl].layer(0) for impl in ("triton", "torch"))
    assert torch.equal(ours, twin)
    again = torch.cat([slots, slots.flip(0)])
    got, expected = (caches[impl].gather(0, again) for impl in ("triton", "torch"))
    assert torch.equal(got.isnan(), expected.isnan())
    keep = ~got.isnan()
    assert torch.equal(bits(got[keep]), bits(expected[keep]))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name: str) -> None:
    format = cache_format(name.split("-")[0], 128, 4, dtype=torch.float32)
    cache = LatentCache(1, 2, 3, 132, torch.float32, DEVICE, "triton", format)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    cache.store(0, torch.zeros(0, 128, device=DEVICE), torch.zeros(0, 4, device=DEVICE), none)
    assert cache.gather(0, none).shape == (0, 132)
