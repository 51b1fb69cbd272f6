"""Scales of e4m3 weights: their shapes, what no scale can be, and one form for all of them.

    weight[o, i] = code[o, i] * scale[o // 128, i // 128]   blocks (DeepSeek-V3, arXiv 2412.19437,
                                                            section 3.3: `weight_scale_inv`)
    weight[o, i] = code[o, i] * scale[o]                    one scale an output channel
    weight[o, i] = code[o, i] * scale                       one scale a tensor

The shape of the scale tells which.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns of a weight that share a scale."""
CODES = torch.float8_e4m3fn


def scale_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List the accepted shapes of the scale of a weight [O, I]: blocks, channels, tensor."""
    outputs, inputs = shape
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    return [blocks, (outputs, 1), (outputs,), (1,), ()]


def value_problems(name: str, scale: Tensor) -> list[str]:
    """List the values of the scale `name` that no weight can have: NaN, infinite, zero, negative,
    as float32 holds them.

    Waits for the device.
    """
    scale = scale.to(torch.float32)
    wrong = (
        ("NaN", scale.isnan()),
        ("infinite", scale.isinf()),
        ("zero", scale == 0),
        ("negative", (scale < 0) & ~scale.isinf()),
    )
    counts = [f"{n} {label}" for label, at in wrong if (n := int(at.sum()))]
    if not counts:
        return []
    return [f"{name} has {' and '.join(counts)} of {scale.numel()}, accepted are finite values > 0"]


def row_scales(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give any scale of a weight [O, I] as float32 `[O, ceil(I / 128)]`, without computing.

    A block's scale stands in each of its rows, so it does not matter where rows are cut in two: 3 %
    of the codes' memory.
    """
    outputs, inputs = shape
    blocks = scale_shapes(shape)[0]
    if tuple(scale.shape) == blocks:
        scale = scale.repeat_interleave(BLOCK, dim=0)[:outputs]
    else:
        scale = scale.reshape(-1, 1).expand(outputs, -(-inputs // BLOCK))
    return scale.to(torch.float32)
