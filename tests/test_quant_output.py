"""Output buffers: the format they ask for, what is refused, and rows written through the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.reference import ReferenceBackend
from specmla.config import MLAConfig
from specmla.errors import ArgumentError
from specmla.quant_key import QuantKey
from specmla.quant_output import QuantOutput
from specmla.quantise import quantise_groups, quantise_nvfp4, quantise_static
from tests.test_layer import PROMPT, VERIFY, Paged, angles, make_layer

E4M3, E5M2, U8, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float32
T, W = 7, 384  # 12 heads of 32: groups of 64 and 128 span heads
CONFIG = MLAConfig(48, 12, 128, 16, 32, 32)


def buffer(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Filled with bytes that would be seen: NaN where the dtype has one."""
    return torch.full((rows, columns * dtype.itemsize), 0x7F, dtype=U8).view(dtype)


def scale(value: float = 0.02) -> Tensor:
    return torch.tensor([value])


MAKE: dict[QuantKey, Callable[[int], QuantOutput]] = {
    QuantKey.NONE: lambda t: QuantOutput(buffer(torch.bfloat16, t, W)),
    QuantKey.FP8_STATIC: lambda t: QuantOutput(buffer(E4M3, t, W), scale()),
    QuantKey.FP8_GROUP_128: lambda t: QuantOutput(
        buffer(E4M3, t, W), block_scale=buffer(F32, t, W // 128)
    ),
    QuantKey.FP8_GROUP_64: lambda t: QuantOutput(
        buffer(E4M3, t, W), block_scale=buffer(F32, t, W // 64)
    ),
    QuantKey.NVFP4: lambda t: QuantOutput(
        buffer(U8, t, W // 2), scale(1e-3), buffer(E4M3, t, W // 16)
    ),
}


def separate(key: QuantKey, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    if key is QuantKey.NONE:
        return rows, None
    if key is QuantKey.FP8_STATIC:
        return quantise_static(rows, scale()), None
    if key is QuantKey.NVFP4:
        return quantise_nvfp4(rows, scale(1e-3))
    return quantise_groups(rows, 128 if key is QuantKey.FP8_GROUP_128 else 64)


def bits(x: Tensor) -> list[Any]:
    return x.contiguous().view(U8).tolist()


@pytest.mark.parametrize("key", QuantKey)
def test_format_is_inferred(key: QuantKey) -> None:
    output = MAKE[key](T)
    assert output.key is key
    assert output.width == W


@pytest.mark.parametrize("key", QuantKey)
@pytest.mark.parametrize("spare", [0, 3])
def test_layer_equals_lift_then_quantise(key: QuantKey, spare: int) -> None:
    """Prompts and verifies of several steps, an empty one too; spare rows stay as they were."""
    layer = make_layer(CONFIG).bfloat16()
    hidden = [torch.randn(40, 48).bfloat16() for _ in range(2)]
    # The last but one step has verify rows of a request that brings none, the last no rows at all.
    steps = [[(0, PROMPT, 20), (1, VERIFY, 4)], [(0, VERIFY, 5), (1, VERIFY, 1)], [(1, VERIFY, 0)]]
    plain, quantised = (Paged(CONFIG, 2, ReferenceBackend(), torch.bfloat16) for _ in range(2))
    for parts in steps:
        outs = []
        for paged in (plain, quantised):
            before = list(paged.lens)
            metadata = paged.metadata(*parts)
            new = [hidden[r][before[r] : paged.lens[r]] for r, _, _ in parts]
            packed = torch.cat([new[i] for i in metadata.order])
            at = angles(CONFIG, metadata.positions, torch.bfloat16)
            output = MAKE[key](metadata.num_rows + spare) if paged is quantised else None
            args = (packed, at, paged.cache, 1, metadata, paged.builder.backend)
            outs.append((layer.attend(*args, output), output, layer.o_proj))
        (lifted, _, o_proj), (values, output, _) = outs
        count = lifted.shape[0]
        assert lifted.dtype == torch.bfloat16
        assert o_proj(lifted).shape == (count, 48)
        want, made = separate(key, lifted)
        assert bits(values) == bits(want)
        assert bits(output.values[:count]) == bits(want)
        assert all(b == 0x7F for row in bits(output.values[count:]) for b in row)
        if made is not None:
            assert bits(output.block_scale[:count]) == bits(made)
            assert all(b == 0x7F for row in bits(output.block_scale[count:]) for b in row)


@pytest.mark.parametrize("key", QuantKey)
def test_rows_without_keys_are_zero_and_change_nobody(key: QuantKey) -> None:
    """Padded rows of a graph: the lift of an empty state is 0, so the absmax is 0."""
    rows = torch.randn(T, W).bfloat16()
    rows[[1, 6]] = 0.0
    output, alone = MAKE[key](T), MAKE[key](1)
    output.write(rows)
    assert not output.values[[1, 6]].float().any()
    made = output.block_scale
    assert made is None or not made.float().isnan().any()
    for row in range(T):
        alone.write(rows[row : row + 1])
        assert bits(alone.values) == bits(output.values[row : row + 1])
        assert made is None or bits(alone.block_scale) == bits(made[row : row + 1])


@pytest.mark.parametrize("key", QuantKey)
def test_buffers_with_gaps(key: QuantKey) -> None:
    rows, dense = torch.randn(T, W).bfloat16(), MAKE[key](T)
    dense.write(rows)
    columns, dtype = dense.values.shape[1], dense.values.dtype
    wide = buffer(dtype, T, columns + 5)
    values, made = wide[:, 2 : columns + 2], None
    if dense.block_scale is not None:
        # Column by column, as some GEMMs want it, with a gap.
        made = buffer(dense.block_scale.dtype, dense.block_scale.shape[1], T + 1).T[:T]
    output = QuantOutput(values, dense.scale, made)
    assert output.key is key
    got = output.write(rows)
    assert got.data_ptr() == values.data_ptr()
    assert bits(values) == bits(dense.values)
    assert all(b == 0x7F for b in bits(wide[:, :2])[0] + bits(wide[:, columns + 2 :])[0])
    assert made is None or bits(made) == bits(dense.block_scale)


REFUSED: dict[str, tuple[Callable[[], QuantOutput], str]] = {
    "group-96": (
        lambda: QuantOutput(buffer(E4M3, T, W), None, buffer(F32, T, 4)),
        r"block_scale has shape \[7, 4\] for 384 values a row, accepted are \[7, 3\] \(groups of "
        r"128\) and \[7, 6\] \(groups of 64\)",
    ),
    "group-of-a-row": (
        lambda: QuantOutput(buffer(E4M3, T, W), None, buffer(F32, T, 1)),
        r"block_scale has shape \[7, 1\]",
    ),
    "group-32": (
        lambda: QuantOutput(buffer(E4M3, T, W), None, buffer(F32, T, 12)),
        r"block_scale has shape \[7, 12\]",
    ),
    "nvfp4-group-32": (
        lambda: QuantOutput(buffer(U8, T, W // 2), scale(), buffer(E4M3, T, 12)),
        r"accepted are \[7, 24\] \(groups of 16\)",
    ),
    "other-rows": (
        lambda: QuantOutput(buffer(E4M3, T, W), None, buffer(F32, T + 1, 3)),
        r"block_scale has shape \[8, 3\]",
    ),
    "no-multiple": (
        lambda: QuantOutput(buffer(E4M3, T, 96), None, buffer(F32, T, 1)),
        r"values are 96 wide, accepted are multiples of 128 or 64",
    ),
    "no-multiple-of-128": (
        lambda: QuantOutput(buffer(E4M3, T, 192), None, buffer(F32, T, 2)),
        r"for 192 values a row, accepted are \[7, 3\] \(groups of 64\)",
    ),
    "nvfp4-no-multiple": (
        lambda: QuantOutput(buffer(U8, T, 20), scale(), buffer(E4M3, T, 3)),
        r"values are 40 wide, accepted are multiples of 16",
    ),
    "fp8-half": (lambda: QuantOutput(buffer(E4M3, T, W)), r"with neither, accepted are scale or"),
    "fp8-both": (
        lambda: QuantOutput(buffer(E4M3, T, W), scale(), buffer(F32, T, 3)),
        r"torch.float8_e4m3fn with both, accepted are scale or block_scale",
    ),
    "nvfp4-half": (
        lambda: QuantOutput(buffer(U8, T, W // 2), scale()),
        r"torch.uint8 with scale, accepted are scale and block_scale",
    ),
    "nvfp4-other-half": (
        lambda: QuantOutput(buffer(U8, T, W // 2), None, buffer(E4M3, T, 24)),
        r"torch.uint8 with block_scale, accepted are scale and block_scale",
    ),
    "nvfp4-nothing": (lambda: QuantOutput(buffer(U8, T, W // 2)), r"torch.uint8 with neither"),
    "plain-with-scale": (
        lambda: QuantOutput(buffer(torch.bfloat16, T, W), scale()),
        r"torch.bfloat16 with scale, accepted is neither scale",
    ),
    "e5m2": (
        lambda: QuantOutput(buffer(E5M2, T, W), scale()),
        r"values are torch.float8_e5m2, accepted are",
    ),
    "int8": (lambda: QuantOutput(buffer(torch.int8, T, W), scale()), r"values are torch.int8"),
    "columns": (
        lambda: QuantOutput(buffer(E4M3, T, 2 * W)[:, ::2], scale()),
        r"values have strides \(768, 2\), accepted are contiguous columns",
    ),
    "transposed": (lambda: QuantOutput(buffer(E4M3, W, T).T, scale()), r"contiguous columns"),
    "expanded": (
        lambda: QuantOutput(buffer(E4M3, 1, W).expand(T, W), scale()),
        r"values have strides \(0, 1\), accepted are rows 384 or more apart",
    ),
    "one-dimension": (lambda: QuantOutput(buffer(E4M3, 1, W)[0], scale()), r"accepted is \[T, W\]"),
    "made-dtype": (
        lambda: QuantOutput(buffer(E4M3, T, W), None, buffer(torch.bfloat16, T, 3)),
        r"block_scale is torch.bfloat16, accepted is torch.float32 for fp8_group_128",
    ),
    "made-strides": (
        lambda: QuantOutput(buffer(E4M3, T, W), None, buffer(F32, 1, 3).expand(T, 3)),
        r"block_scale has strides \(0, 1\), accepted are contiguous rows or columns",
    ),
    "scale-dtype": (
        lambda: QuantOutput(buffer(E4M3, T, W), scale().double()),
        r"scale is torch.float64 of shape \[1\], accepted is one torch.float32",
    ),
    "scale-per-row": (
        lambda: QuantOutput(buffer(E4M3, T, W), torch.ones(T, 1)),
        r"scale is torch.float32 of shape \[7, 1\]",
    ),
    "values-no-tensor": (
        lambda: QuantOutput([1.0], 0.5, "x"),  # type: ignore[arg-type]
        r"values is \[1.0\], accepted is a torch.Tensor; scale is 0.5, .* block_scale is 'x', ",
    ),
    "values-none": (lambda: QuantOutput(None), r"values is None, accepted is a torch.Tensor"),
    "scale-number": (
        lambda: QuantOutput(buffer(E4M3, T, W), 0.5),  # type: ignore[arg-type]
        r"scale is 0.5, accepted is a torch.Tensor",
    ),
    "scale-without-value": (
        lambda: QuantOutput(buffer(E4M3, T, W).to("meta"), scale().to("meta")),
        r"scale is on meta, accepted is a device with memory",
    ),
    "fused-no-bool": (
        lambda: QuantOutput(buffer(E4M3, T, W), scale(), fused="no"),  # type: ignore[arg-type]
        r"fused is 'no', accepted are True, False",
    ),
    "device": (
        lambda: QuantOutput(buffer(E4M3, T, W).to("meta"), scale()),
        r"buffers are on \['cpu', 'meta'\], accepted is one device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, torch.nan, torch.inf, -torch.inf])
def test_bad_scales_are_refused(value: float) -> None:
    with pytest.raises(ArgumentError, match=r"scale is .*, accepted are finite values > 0"):
        QuantOutput(buffer(E4M3, T, W), scale(value))


def test_all_reasons_at_once() -> None:
    with pytest.raises(ArgumentError) as raised:
        QuantOutput(buffer(U8, T, W)[:, ::2], scale(-1.0), buffer(F32, 1, 24).expand(T, 24))
    message = str(raised.value)
    for part in ("contiguous columns", "scale is -1.0", "is torch.float32, acc", "strides (0, 1)"):
        assert part in message, part


def test_layer_refuses_before_it_stores() -> None:
    layer = make_layer(CONFIG).bfloat16()
    paged = Paged(CONFIG, 1, ReferenceBackend(), torch.bfloat16)
    metadata = paged.metadata((0, VERIFY, 4))
    at = angles(CONFIG, metadata.positions, torch.bfloat16)
    args = (torch.randn(4, 48).bfloat16(), at, paged.cache, 1, metadata, paged.builder.backend)
    for output, message in (
        (
            QuantOutput(buffer(E4M3, 4, 128), scale()),
            r"128 values a row, accepted are H \* V = 384",
        ),
        (MAKE[QuantKey.NVFP4](3), r"output holds 3 rows, accepted are >= 4"),
        (QuantOutput(buffer(F32, 4, W)), r"output is torch.float32, accepted is torch.bfloat16"),
        (QuantOutput(buffer(U8, 3, 64), scale(), buffer(E4M3, 3, 8)), r"128 values.*3 rows"),
        (
            QuantOutput(torch.empty(4, W, dtype=torch.bfloat16, device="meta")),
            r"output is on meta, accepted is cpu, where the rows are",
        ),
        (buffer(E4M3, 4, W), r"output is a Tensor, accepted is a specmla.quant_output.QuantOutput"),
    ):
        with pytest.raises(ArgumentError, match=message):
            layer.attend(*args, output)
    assert paged.cache.layer(1).isnan().all()
