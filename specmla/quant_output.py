"""The buffers that a layer's attended rows are quantised into."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from specmla.errors import kind_problem, require
from specmla.quant_key import QuantKey, infer_quant_key
from specmla.quantise import quantise_groups, quantise_nvfp4, quantise_static

KINDS = {
    QuantKey.NONE: 0,
    QuantKey.FP8_STATIC: 1,
    QuantKey.FP8_GROUP_128: 2,
    QuantKey.FP8_GROUP_64: 2,
    QuantKey.NVFP4: 3,
}
"""What the kernel calls the formats."""

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of models whose up-projection the kernel computes."""

FUSED_NAMES = [str(dtype) for dtype in FUSED_DTYPES]


class QuantOutput:
    """Where the H * V = W values of up to T rows go, and in which format: see `QuantKey`.

    Made once, for the most rows of a step: to check `scale`, it waits for the device.

    Args:
        values: [T, W] of the model's dtype or e4m3, or [T, W / 2] uint8; the columns contiguous,
            rows may have gaps between them.
        scale: one float32, read: of all values, for e4m3 without `block_scale` and for uint8.
        block_scale: [T, W / group], written: float32 for e4m3 (groups of 128 or 64), e4m3 for uint8
            (groups of 16); row by row or column by column, with or without gaps.
        fused: quantise absorbed rows in the epilogue of their up-projection (one Triton kernel, and
            no rows in the model's dtype), not after it. Groups then lie within heads. Prompt rows
            are quantised by themselves in any case.

    Attributes:
        key: the format, inferred from dtype and shapes.

    Raises:
        ArgumentError: buffers of no format, of a wrong dtype, device or stride, or a scale that is
            not finite and positive; all reasons are listed.
    """

    def __init__(
        self,
        values: Tensor,
        scale: Tensor | None = None,
        block_scale: Tensor | None = None,
        *,
        fused: bool = False,
    ) -> None:
        tensors = {"values": values, "scale": scale, "block_scale": block_scale}
        found = [
            text
            for name, given in tensors.items()
            if given is not None or name == "values"
            for text in kind_problem(name, given, Tensor)
        ]
        if not isinstance(fused, bool):
            found.append(f"fused is {fused!r}, accepted are True, False")
        require(found, "QuantOutput")
        key, found = infer_quant_key(values, scale, block_scale)
        found += _values_problems(values)
        if scale is not None:
            found += _scale_problems(scale)
        if block_scale is not None:
            found += _block_problems(block_scale, key)
        devices = {str(t.device) for t in (values, scale, block_scale) if t is not None}
        if len(devices) > 1:
            found.append(f"buffers are on {sorted(devices)}, accepted is one device")
        if fused:
            found += _fused_problems(values.device)
        require(found, "QuantOutput")
        assert key is not None
        self.fused = fused
        self.key, self.values, self.scale, self.block_scale = key, values, scale, block_scale

    @property
    def width(self) -> int:
        """W, values of a row."""
        return self.values.shape[1] * self.key.values_per_element

    def problems(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        head_width: int | None = None,
        device: torch.device | None = None,
    ) -> list[str]:
        """List why `num_rows` rows of `width` values of a model of `dtype` can't go here.

        `head_width` is V, of which a fused output needs whole groups; `device` that of the rows.
        """
        found, group = [], self.key.group or 1
        if self.fused and (head_width is None or head_width % group):
            found.append(f"V is {head_width}, accepted by a fused output are multiples of {group}")
        if self.fused and dtype not in FUSED_DTYPES:
            found.append(f"dtype is {dtype}, accepted by a fused output are {FUSED_NAMES}")
        if self.width != width:
            found.append(f"output holds {self.width} values a row, accepted are H * V = {width}")
        if device is not None and self.values.device != device:
            found.append(
                f"output is on {self.values.device}, accepted is {device}, where the rows are"
            )
        if self.values.shape[0] < num_rows:
            found.append(f"output holds {self.values.shape[0]} rows, accepted are >= {num_rows}")
        if self.key is QuantKey.NONE and self.values.dtype != dtype:
            found.append(f"output is {self.values.dtype}, accepted is {dtype} or a quantised one")
        return found

    def lift(self, latent: Tensor, w_uv: Tensor, weight_scale: Tensor | None = None) -> None:
        """Up-project latents `[T, H, C]` by `[H, C, V]` into the first T rows, in one kernel.

        `w_uv` may be codes (uint8), with their scales [H, V, ceil(C / 128)] float32.
        """
        from specmla.kernels.lift import lift_rows

        values, made = (
            t.view(torch.uint8) if t is not None and t.element_size() == 1 else t
            for t in (self.values, self.block_scale)
        )
        assert values is not None
        latent = latent if latent.stride(-1) == 1 else latent.contiguous()
        lift_rows(latent, w_uv, KINDS[self.key], values, self.scale, made, weight_scale)

    def write(self, rows: Tensor, first: int = 0) -> Tensor:
        """Quantise `[T, W]` into rows `first` on of the buffers, and no others; gives all rows up
        to the last written.
        """
        count = first + rows.shape[0]
        values, made = self.values[first:count], None
        if self.key is QuantKey.NONE:
            values.copy_(rows)
            return self.values[:count]
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
            self.block_scale[first:count].copy_(made)
        values.copy_(codes)
        return self.values[:count]


def _fused_problems(device: torch.device) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return ["fused is True, but triton is not installed; accepted is False"]
    from specmla.kernels.store import runs_on

    return [] if runs_on(device) else [f"fused is True on {device}, accepted are CUDA devices"]


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
    if scale.is_meta:
        return ["scale is on meta, accepted is a device with memory: its value is checked"]
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
