"""Rows of an attention output as codes and scales, in plain torch.

Rows come in the model's dtype, so what was rounded to bfloat16 is rounded before its absmax is
taken. Arithmetic is float32, quotients are rounded to nearest, ties to even, and saturate; an
infinity counts as the largest float32. A NaN stays one: as the code of its value where the scale is
given, as the scale of its group where that is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX, E2M1_MAX = 448.0, 6.0
LEAST_ABSMAX = 1e-10
"""A group of smaller values, or of zeros, is scaled as if this were its largest."""
NVFP4_GROUP = 16
_LARGEST = torch.finfo(torch.float32).max


def quantise_static(rows: Tensor, scale: Tensor) -> Tensor:
    """Quantise `[T, W]` to e4m3 codes `[T, W]` of `rows / scale`; `scale` holds one float32."""
    return _to_e4m3(_finite(rows) / scale.reshape(()))


def quantise_groups(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise `[T, W]` to e4m3 codes `[T, W]` and float32 scales `[T, W / group]`.

    The scale is absmax / 448, of at least `LEAST_ABSMAX`.
    """
    grouped = _finite(rows).unflatten(-1, (-1, group))
    # By a number torch multiplies by its reciprocal on a GPU, which may round twice.
    largest = torch.full((), E4M3_MAX, device=rows.device)
    scale = grouped.abs().amax(-1).clamp(min=LEAST_ABSMAX) / largest
    return _to_e4m3(grouped / scale.unsqueeze(-1)).flatten(-2), scale


def quantise_nvfp4(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[T, W]` to e2m1 codes, two a byte `[T, W / 2]`, and e4m3 scales `[T, W / 16]`.

    A value is read as code * block scale * `scale`: the block scale is absmax / (6 `scale`), and
    where that rounds to 0, so do the values. An engine that keeps the reciprocal of `scale` (the
    factor before quantisation, 2688 / absmax of the tensor) passes 1 over it.
    """
    grouped = _finite(rows).unflatten(-1, (-1, NVFP4_GROUP))
    whole = scale.reshape(())
    block = _to_e4m3(grouped.abs().amax(-1) / (E2M1_MAX * whole))
    step = (block.float() * whole).unsqueeze(-1)
    code = torch.where(step == 0, 0, _to_e2m1(grouped / step)).to(torch.uint8).flatten(-2)
    return code[..., 0::2] | code[..., 1::2] << 4, block


def _finite(rows: Tensor) -> Tensor:
    return rows.float().clamp(-_LARGEST, _LARGEST)


def _to_e4m3(x: Tensor) -> Tensor:
    # Some casts saturate, others (older torch) make NaN of what is too large; a NaN has one code.
    return x.clamp(-E4M3_MAX, E4M3_MAX).masked_fill(x.isnan(), torch.nan).to(E4M3)


def _to_e2m1(x: Tensor) -> Tensor:
    """Give the four bits of 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and the sign; a NaN gives 0."""
    size = x.abs()
    # Half way between two codes the even one is taken: above at 0.75, 1.75 and 3.5.
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    return torch.where(x.signbit() & ~x.isnan(), code + 8, code)
