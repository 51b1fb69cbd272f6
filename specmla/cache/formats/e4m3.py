"""The e4m3 code: one sign, four exponent and three mantissa bits, no infinity (OCP FP8, "fn").

Largest value 448 = 1.75 * 2^8, least normal 2^-6, least subnormal 2^-9; NaN is 0x7f or 0xff. A
normal code keeps a value to half a unit of 4 significant bits, a relative 2^-4; below 2^-6 the
error is absolute, at most 2^-10.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""Largest code's value."""

NAN_CODE = 0x7F
"""What every NaN becomes."""

LEAST_SCALE = 2.0**-100
"""Scale of rows and groups that hold less than any code: its codes stay normal in float32."""

SCALE_MASK = ~0xF
"""Bits of a float32 scale that are kept: 20 of 24 significant ones."""


def encode_e4m3(values: Tensor) -> Tensor:
    """Round float32 values to codes, uint8: nearest even, saturating at 448; NaN stays NaN."""
    # Whether torch saturates depends on its version; clamped first, nothing overflows.
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), NAN_CODE)


def decode_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the values of uint8 codes; exact in float16, bfloat16 and everything wider."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


def dynamic_scale(values: Tensor) -> Tensor:
    """Give the float32 scale [..., 1] that maps the largest of float32 values [..., n] to 448.

    It is largest / 448 cut to 20 significant bits, so that 448 * scale is exact in float32 and a
    row that was gathered and is stored again gets the same scale, whatever it was rounded to in
    between. NaN doesn't count; infinities have to be clamped before.
    """
    largest = values.abs().nan_to_num(nan=0.0).amax(-1, keepdim=True)
    scale = divide(largest, E4M3_MAX).clamp(min=LEAST_SCALE)
    return (scale.view(torch.int32) & SCALE_MASK).view(torch.float32)


def divide(values: Tensor, number: float) -> Tensor:
    """Divide by a number, rounded to nearest on every device (1 leaves the values as they are).

    By a Python number torch multiplies by the reciprocal on a GPU, which may round twice.
    """
    if number == 1.0:
        return values
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def finite_floats(values: Tensor) -> Tensor:
    """Convert to float32, infinities to the largest finite value of the dtype that they came in."""
    limit = min(torch.finfo(values.dtype).max, torch.finfo(torch.float32).max)
    return values.detach().to(torch.float32).clamp(-limit, limit)
