"""The formats of an attention output, and which one a set of buffers asks for."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class QuantKey(enum.Enum):
    """How a row of H * V values is handed on; every scale multiplies codes as they are read.

    NONE: in the model's dtype. FP8_STATIC: e4m3, one scale given for the tensor. FP8_GROUP_128 and
    FP8_GROUP_64: e4m3, a float32 scale made for each group of so many values of a row. NVFP4: e2m1,
    two values a byte (the even one in the low half), an e4m3 scale made for every 16 values, in
    linear order, and one scale given for the tensor.
    """

    NONE = "none"
    FP8_STATIC = "fp8_static"
    FP8_GROUP_128 = "fp8_group_128"
    FP8_GROUP_64 = "fp8_group_64"
    NVFP4 = "nvfp4"

    @property
    def group(self) -> int | None:
        """Values that share a made scale."""
        return _GROUPS.get(self)

    @property
    def values_per_element(self) -> int:
        """Values in an element of the buffer."""
        return 2 if self is QuantKey.NVFP4 else 1

    @property
    def block_scale_dtype(self) -> torch.dtype | None:
        """Dtype of the made scales."""
        if self.group is None:
            return None
        return torch.float8_e4m3fn if self is QuantKey.NVFP4 else torch.float32


_GROUPS = {QuantKey.FP8_GROUP_128: 128, QuantKey.FP8_GROUP_64: 64, QuantKey.NVFP4: 16}


def infer_quant_key(
    values: Tensor, scale: Tensor | None, block_scale: Tensor | None
) -> tuple[QuantKey | None, list[str]]:
    """Tell the format of buffers by their dtype, what scales there are, and how many.

    Args:
        values: [T, W] of the model's dtype or e4m3, or [T, W / 2] uint8.
        scale: given, one value; with e4m3 alone or uint8.
        block_scale: made, [T, W / group]; with e4m3 alone or uint8.

    Returns:
        The format, or None and every reason why there is none.
    """
    pair = (scale is not None, block_scale is not None)
    got = {(False, False): "neither", (True, False): "scale", (False, True): "block_scale"}.get(
        pair, "both"
    )
    if values.dtype in MODEL_DTYPES:
        if any(pair):
            return None, [f"values are {values.dtype} with {got}, accepted is neither scale"]
        return QuantKey.NONE, []
    if values.dtype == torch.uint8:
        if not all(pair):
            return None, [f"values are torch.uint8 with {got}, accepted are scale and block_scale"]
        return _of_group(values, block_scale, (QuantKey.NVFP4,))
    if values.dtype == torch.float8_e4m3fn:
        if pair == (True, False):
            return QuantKey.FP8_STATIC, []
        if pair == (False, True):
            return _of_group(values, block_scale, (QuantKey.FP8_GROUP_128, QuantKey.FP8_GROUP_64))
        return None, [f"values are {values.dtype} with {got}, accepted are scale or block_scale"]
    accepted = [*MODEL_DTYPES, torch.float8_e4m3fn, torch.uint8]
    return None, [f"values are {values.dtype}, accepted are {[str(d) for d in accepted]}"]


def _of_group(
    values: Tensor, block_scale: Tensor | None, keys: tuple[QuantKey, ...]
) -> tuple[QuantKey | None, list[str]]:
    """Find the format whose groups give a scale of that shape."""
    assert block_scale is not None
    if values.dim() != 2:
        return None, []  # the shape of the values is the caller's reason
    rows, columns = values.shape
    accepted = []
    for key in keys:
        width, group = columns * key.values_per_element, key.group or 1
        if width and width % group == 0:
            shape = (rows, width // group)
            if tuple(block_scale.shape) == shape:
                return key, []
            accepted.append(f"{list(shape)} (groups of {group})")
    width = columns * keys[0].values_per_element
    if not accepted:
        groups = " or ".join(str(key.group) for key in keys)
        return None, [f"values are {width} wide, accepted are multiples of {groups}"]
    return None, [
        f"block_scale has shape {list(block_scale.shape)} for {width} values a row, accepted are "
        + " and ".join(accepted)
    ]
