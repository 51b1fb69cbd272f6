"""Kernels read what they are told to: rows that don't fit a weight are refused, not computed."""

from __future__ import annotations

import pytest
import torch

from specmla import ArgumentError
from specmla.config import MLAConfig
from specmla.e4m3_up_projection import E4M3UpProjection
from specmla.row_local import (
    Linear,
    RMSNorm,
    multiply,
    multiply_codes_by_head,
    multiply_heads,
    sum_weighted,
)
from specmla.weight_scales import CODES

pytest.importorskip("triton")

CONFIG = MLAConfig(32, 2, 16, 8, 8, 12)


@pytest.fixture(autouse=True)
def _no_grad():
    device = "cuda" if torch.cuda.is_available() else "cpu"  # else by Triton's interpreter
    with torch.no_grad(), torch.device(device):
        yield


def switched(part):
    vars(part)["batch_invariant"] = True
    return part


def kept(dtype: torch.dtype = torch.float32) -> E4M3UpProjection:
    codes = torch.randn(40, 16).to(CODES)
    return E4M3UpProjection.from_codes(CONFIG, codes, torch.tensor(0.5), dtype)


@pytest.mark.parametrize("shape", [(3, 15), (3, 17), (0, 17), (3, 1), (2, 3, 8)])
def test_widths(shape):
    rows = torch.randn(shape)
    accepted = r"accepted with this weight are \[\.\.\., 16\]"
    for call in (
        switched(Linear(16, 5)),
        lambda x: multiply(x, torch.randn(5, 16)),
        kept(),
        lambda x: kept().forward(x),
    ):
        with pytest.raises(ArgumentError, match=accepted):
            call(rows)
    with pytest.raises(ArgumentError, match=r"normed are \[16\]"):
        switched(RMSNorm(16))(rows)


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 1, 8), (2, 2, 9), (2, 8), (1, 2, 2, 8)])
def test_heads(shape):
    rows, accepted = torch.randn(shape), r"accepted with this weight are \[\.\.\., 2, 8\]"
    with pytest.raises(ArgumentError, match=accepted):
        multiply_heads(rows, torch.randn(2, 8, 5))
    with pytest.raises(ArgumentError, match=accepted):
        kept().absorb(rows)


def test_a_bias_and_scales_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r"bias is \[4\], accepted is \[5\] contiguous"):
        multiply(torch.randn(2, 16), torch.randn(5, 16), torch.randn(4))
    codes = torch.zeros(2, 8, 16, dtype=torch.uint8)
    for scale, along_k in ((torch.ones(2, 16, 1), True), (torch.ones(2, 8, 1), False)):
        with pytest.raises(ArgumentError, match=r"scale is torch\.float32 .*, accepted is"):
            multiply_codes_by_head(torch.randn(3, 2, 8), codes, scale, along_k=along_k)


def test_a_norm_of_two_dimensions_and_a_weight_with_strides():
    with pytest.raises(ArgumentError, match=r"rows are \[\.\.\., 16\], normed are \[2, 16\]"):
        switched(RMSNorm((2, 16)))(torch.randn(3, 2, 16))
    norm = RMSNorm(16)
    norm.weight = torch.nn.Parameter(torch.randn(32)[::2])
    rows = torch.randn(3, 16)
    expected = norm(rows)
    torch.testing.assert_close(switched(norm)(rows), expected)


def test_weights_that_do_not_fit_what_is_summed():
    pairs = torch.randn(3, 2, 8)
    for weights in (torch.ones(3, 3), torch.ones(2, 2), torch.ones(3, 2, 1)):
        with pytest.raises(ArgumentError, match=r"weights are \[.*\], accepted is \[T, k\]"):
            sum_weighted(pairs, weights)
    with pytest.raises(ArgumentError, match=r"dtype is torch\.float64"):
        sum_weighted(pairs, torch.ones(3, 2, dtype=torch.float64))
    assert sum_weighted(pairs[:0], torch.ones(0, 2)).shape == (0, 8)
    strided = torch.randn(3, 8, 2).transpose(1, 2)
    weights = torch.randn(3, 4)[:, ::2]
    first, second = (strided * weights[..., None]).unbind(1)
    assert torch.equal(sum_weighted(strided, weights), first + second)


def test_all_reasons_at_once():
    with pytest.raises(ArgumentError) as caught:
        multiply(torch.randn(2, 17).half(), torch.randn(5, 16), torch.randn(4))
    wanted = ("torch.float16, the weight torch.float32", "rows are [2, 17]", "bias is [4]")
    assert all(part in str(caught.value) for part in wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, CODES, None, "float32"])
def test_dtypes_of_kept_codes(dtype):
    with pytest.raises(ArgumentError, match=r"dtype is .*, accepted are \['torch\.bfloat16'"):
        E4M3UpProjection(CONFIG, dtype)


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_scales_that_float32_does_not_hold(value):
    module = kept()
    before = module.scale.clone(), module.weight.clone()
    scale = torch.full((40,), value, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"40 (infinite|zero) of 40"):
        module.load(torch.zeros(40, 16).to(CODES), scale)
    assert torch.equal(module.scale, before[0])
    assert torch.equal(module.weight, before[1])


@pytest.mark.parametrize("given", [None, 0.5, "x"])
def test_what_is_no_tensor(given):
    with pytest.raises(ArgumentError) as caught:
        E4M3UpProjection.from_codes(CONFIG, given, given, torch.float32)
    assert f"codes are {given!r}, accepted" in str(caught.value)
    assert f"scale is {given!r}, accepted" in str(caught.value)


@pytest.mark.parametrize("dtype", [CODES, torch.float8_e8m0fnu])
def test_scales_of_any_floating_dtype(dtype):
    codes, module = torch.randn(40, 16).to(CODES), kept()
    module.load(codes, torch.full((40,), 0.5).to(dtype))
    assert torch.equal(module.scale, torch.full((40, 1), 0.5))
    with pytest.raises(ArgumentError, match="40 NaN of 40"):
        module.load(codes, torch.full((40,), float("nan")).to(dtype))
