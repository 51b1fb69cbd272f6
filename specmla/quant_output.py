"""The buffers that a layer's attended rows are quantised into."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.errors import require
from specmla.quant_key import QuantKey, infer_quant_key
from specmla.quantise import quantise_groups, quantise_nvfp4, quantise_static


class QuantOutput:
    """Where the H * V = W values of up to T rows go, and in which format: see `QuantKey`.

    Made once, for the most rows of a step: to check `scale`, it waits for the device.

    Args:
        values: [T, W] of the model's dtype or e4m3, or [T, W / 2] uint8; the columns contiguous,
            rows may have gaps between them.
        scale: one float32, read: of all values, for e4m3 without `block_scale` and for uint8.
        block_scale: [T, W / group], written: float32 for e4m3 (groups of 128 or 64), e4m3 for uint8
            (groups of 16); row by row or column by column, with or without gaps.

    Attributes:
        key: the format, inferred from dtype and shapes.

    Raises:
        ArgumentError: buffers of no format, of a wrong dtype, device or stride, or a scale that is
            not finite and positive; all reasons are listed.
    """

    def __init__(
        self, values: Tensor, scale: Tensor | None = None, block_scale: Tensor | None = None
    ) -> None:
        key, found = infer_quant_key(values, scale, block_scale)
        found += _values_problems(values)
        if scale is not None:
            found += _scale_problems(scale)
        if block_scale is not None:
            found += _block_problems(block_scale, key)
        devices = {str(t.device) for t in (values, scale, block_scale) if t is not None}
        if len(devices) > 1:
            found.append(f"buffers are on {sorted(devices)}, accepted is one device")
        require(found, "QuantOutput")
        assert key is not None
        self.key, self.values, self.scale, self.block_scale = key, values, scale, block_scale

    @property
    def width(self) -> int:
        """W, values of a row."""
        return self.values.shape[1] * self.key.values_per_element

    def problems(self, num_rows: int, width: int, dtype: torch.dtype) -> list[str]:
        """List why `num_rows` rows of `width` values of a model of `dtype` can't go here."""
        found = []
        if self.width != width:
            found.append(f"output holds {self.width} values a row, accepted are H * V = {width}")
        if self.values.shape[0] < num_rows:
            found.append(f"output holds {self.values.shape[0]} rows, accepted are >= {num_rows}")
        if self.key is QuantKey.NONE and self.values.dtype != dtype:
            found.append(f"output is {self.values.dtype}, accepted is {dtype} or a quantised one")
        return found

    def write(self, rows: Tensor) -> Tensor:
        """Quantise `[T, W]` into the first T rows of the buffers, which are given; no others."""
        count = rows.shape[0]
        values, made = self.values[:count], None
        if self.key is QuantKey.NONE:
            return values.copy_(rows)
        if self.key is QuantKey.NVFP4:
            assert self.scale is not None
            codes, made = quantise_nvfp4(rows, self.scale)
        elif self.key.group is not None:
            codes, made = quantise_groups(rows, self.key.group)
        else:
            assert self.scale is not None
            codes = quantise_static(rows, self.scale)
        if made is not None:
            assert self.block_scale is not None
            self.block_scale[:count].copy_(made)
        return values.copy_(codes)


def _values_problems(values: Tensor) -> list[str]:
    if values.dim() != 2 or not values.shape[1]:
        return [f"values have shape {list(values.shape)}, accepted is [T, W]"]
    rows, columns = values.shape
    found = []
    if columns > 1 and values.stride(1) != 1:
        found.append(f"values have strides {values.stride()}, accepted are contiguous columns")
    elif rows > 1 and values.stride(0) < columns:
        found.append(
            f"values have strides {values.stride()}, accepted are rows {columns} or more apart"
        )
    return found


def _scale_problems(scale: Tensor) -> list[str]:
    if scale.numel() != 1 or scale.dim() > 1 or scale.dtype != torch.float32:
        return [
            f"scale is {scale.dtype} of shape {list(scale.shape)}, accepted is one torch.float32"
        ]
    value = float(scale)
    if not 0.0 < value < torch.inf:
        return [f"scale is {value}, accepted are finite values > 0"]
    return []


def _block_problems(block_scale: Tensor, key: QuantKey | None) -> list[str]:
    found = []
    if key is not None and block_scale.dtype != key.block_scale_dtype:
        found.append(
            f"block_scale is {block_scale.dtype}, accepted is {key.block_scale_dtype} for "
            f"{key.value}"
        )
    if block_scale.dim() == 2:
        (rows, columns), (down, right) = block_scale.shape, block_scale.stride()
        by_row = (columns == 1 or right == 1) and (rows == 1 or down >= columns)
        by_column = (rows == 1 or down == 1) and (columns == 1 or right >= rows)
        if not by_row and not by_column:
            found.append(
                f"block_scale has strides {block_scale.stride()}, accepted are contiguous rows or "
                "columns that don't overlap"
            )
    return found
