"""Outputs quantised in the up-projection's epilogue: to the bit a separate quantisation of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.reference import ReferenceBackend
from specmla.config import MLAConfig
from specmla.errors import ArgumentError
from specmla.quant_key import QuantKey
from specmla.quant_output import QuantOutput
from tests.test_layer import PROMPT, VERIFY, Paged, angles, make_layer

pytest.importorskip("triton")

E4M3, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)
T, C = 70, 48  # more than a tile of rows; a last step of columns that is not whole


def buffer(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns * dtype.itemsize), 0x7F, dtype=U8, device=DEVICE).view(dtype)


def make(key: QuantKey, rows: int, width: int, dtype: torch.dtype, **how: bool) -> QuantOutput:
    scale = torch.tensor([0.02], device=DEVICE)
    if key is QuantKey.NONE:
        return QuantOutput(buffer(dtype, rows, width), **how)
    if key is QuantKey.FP8_STATIC:
        return QuantOutput(buffer(E4M3, rows, width), scale, **how)
    if key is QuantKey.NVFP4:
        made = buffer(E4M3, width // 16, rows + 1).T[:rows]  # column by column, with a gap
        return QuantOutput(buffer(U8, rows, width // 2 + 5)[:, : width // 2], scale, made, **how)
    return QuantOutput(
        buffer(E4M3, rows, width), block_scale=buffer(F32, rows, width // (key.group or 1)), **how
    )


def bits(x: Tensor) -> list[Any]:
    return x.contiguous().view(U8).tolist()


def operands(heads: int, value: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents with special rows, and W_UV as a view of `kv_b_proj`."""
    torch.manual_seed(value)
    latent = torch.randn(heads, T, C, device=DEVICE).to(dtype).transpose(0, 1)
    latent *= 2.0 ** torch.randint(-9, 7, (T, 1, 1), device=DEVICE)
    latent[3], latent[5, 0, 7], latent[9] = 0.0, torch.nan, 1e-30
    weight = torch.randn(heads, 8 + value, C, device=DEVICE).to(dtype)[:, 8:]
    return latent, weight.transpose(1, 2)


SHAPES = [(3, 128), (2, 192), (3, 64), (5, 16)]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", QuantKey)
def test_codes_are_those_of_the_kernel_and_a_separate_quantisation(
    key: QuantKey, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    heads, value = shape
    if value % (key.group or 1):
        pytest.skip("groups span heads: refused")
    latent, weight = operands(heads, value, dtype)
    plain = make(QuantKey.NONE, T, heads * value, dtype, fused=True)
    plain.lift(latent, weight)
    fused, apart = (make(key, T + 2, heads * value, dtype, fused=how) for how in (True, False))
    fused.lift(latent, weight)
    apart.write(plain.values)
    assert bits(fused.values) == bits(apart.values)
    if fused.block_scale is not None:
        assert bits(fused.block_scale) == bits(apart.block_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", [key for key in QuantKey if key is not QuantKey.NONE])
def test_codes_are_at_most_one_from_those_of_bmm(key: QuantKey, dtype: torch.dtype) -> None:
    """At most 1% differ, by one code: both round the same sums, added up in another order."""
    torch.manual_seed(0)
    latent = torch.randn(T, 4, 256, device=DEVICE).to(dtype)
    weight = (torch.randn(4, 256, 128, device=DEVICE) / 16).to(dtype)
    fused, apart = (make(key, T, 512, dtype, fused=how) for how in (True, False))
    fused.lift(latent, weight)
    apart.write(torch.bmm(latent.transpose(0, 1), weight).transpose(0, 1).flatten(1))
    one, other = (ordered_codes(output) for output in (fused, apart))
    assert (one - other).abs().max() <= 1
    assert (one != other).float().mean() <= 0.01
    assert one.unique().numel() > 8


def ordered_codes(output: QuantOutput) -> Tensor:
    """Codes as integers in the order of their values; both zeros are 0."""
    codes = output.values.view(U8).int()
    if output.key is QuantKey.NVFP4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten()
        return torch.where(codes >= 8, 8 - codes, codes)
    return torch.where(codes >= 128, 128 - codes, codes)


def test_products_are_right() -> None:
    latent, weight = operands(3, 64, torch.float32)
    output = make(QuantKey.NONE, T, 192, torch.float32, fused=True)
    output.lift(latent, weight)
    keep = torch.arange(T, device=DEVICE) != 5
    exact = torch.einsum("thc,hcv->thv", latent.double(), weight.double()).flatten(1)[keep]
    sizes = torch.einsum("thc,hcv->thv", latent.double().abs(), weight.double().abs()).flatten(1)
    error = (output.values[keep].double() - exact).abs()
    assert (error <= C * 2.0**-24 * sizes[keep]).all()


CONFIG = MLAConfig(48, 3, 128, 16, 32, 64)


@pytest.mark.skipif(DEVICE == "cuda", reason="the layer of these helpers lies on the CPU")
@pytest.mark.parametrize("key", [QuantKey.NONE, QuantKey.FP8_GROUP_64, QuantKey.NVFP4])
def test_a_layer_fuses_absorbed_rows_and_quantises_prompts_apart(key: QuantKey) -> None:
    layer = make_layer(CONFIG).float()
    hidden = [torch.randn(40, 48) for _ in range(2)]
    width = CONFIG.num_heads * CONFIG.v_head_dim
    both = [Paged(CONFIG, 2, ReferenceBackend(), F32) for _ in range(2)]
    for parts in ([(0, PROMPT, 20), (1, VERIFY, 4)], [(0, VERIFY, 5)], [(1, VERIFY, 0)]):
        codes = []
        for paged, fused in zip(both, (True, False), strict=True):
            before = list(paged.lens)
            metadata = paged.metadata(*parts)
            new = [hidden[r][before[r] : paged.lens[r]] for r, _, _ in parts]
            packed = torch.cat([new[i] for i in metadata.order])
            at = angles(CONFIG, metadata.positions, F32)
            output = make(key, metadata.num_rows + 3, width, F32, fused=fused)
            args = (packed, at, paged.cache, 1, metadata, paged.builder.backend)
            values = layer.attend(*args, output)
            assert values.data_ptr() == output.values.data_ptr() or not values.numel()
            assert values.shape[0] == metadata.num_rows
            assert all(b == 0x7F for row in bits(output.values[len(values) :]) for b in row)
            codes.append(values.float() if key is QuantKey.NONE else ordered_codes(output))
        if key is QuantKey.NONE:
            torch.testing.assert_close(*codes, rtol=1e-4, atol=1e-5)
        else:
            assert (codes[0] - codes[1]).abs().max() <= 1


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    output = make(QuantKey.FP8_GROUP_128, T, 384, torch.float16, fused=True)
    found = output.problems(T, 384, torch.float64, 64)
    assert found == [
        "V is 64, accepted by a fused output are multiples of 128",
        "dtype is torch.float64, accepted by a fused output are ['torch.bfloat16', "
        "'torch.float16', 'torch.float32']",
    ]
    assert not make(QuantKey.FP8_GROUP_128, T, 384, F32).problems(T, 384, torch.float64, 64)
    monkeypatch.setattr("specmla.kernels.store.runs_on", lambda device: device.type == "cuda")
    with pytest.raises(ArgumentError, match="fused is True on cpu, accepted are CUDA devices"):
        QuantOutput(torch.zeros(3, 4), fused=True)
