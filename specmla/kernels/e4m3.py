"""e4m3 codes by integer arithmetic: the same bits on every architecture and in the interpreter.

One sign, four exponent and three mantissa bits, bias 7; 0x7f is NaN, there is no infinity. Hardware
conversions exist from sm_89 on only.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def decode_e4m3(code):
    """Values float32 of uint8 codes; exact."""
    bits = code.to(tl.int32)
    size = bits & 0x7F
    # Bias 127 instead of 7; a subnormal is a multiple of 2^-9.
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    # The sign as a bit, so that a negative zero stays one.
    return (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(value):
    """Codes uint8 of float32 values: nearest even, saturating at 448, NaN to 0x7f."""
    bits = value.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size > E4M3_MAX, E4M3_MAX, size)
    wide = size.to(tl.int32, bitcast=True)
    # 20 of 23 mantissa bits go: add half of the last kept one, less one unless that is odd.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # The float32 numbers from 2^14 on are multiples of 2^-9, so this sum rounds to those.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(value == value, code, 0x7F).to(tl.uint8)


@triton.jit
def clamp_finite(value, LIMIT: tl.constexpr):
    """Infinities as +-LIMIT; NaN stays."""
    return tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))


@triton.jit
def dynamic_scale(value):
    """Scale [M] that maps the largest of `value` [M, N] to 448, cut to 20 significant bits.

    NaN doesn't count; infinities are to be clamped before.
    """
    largest = tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=1)
    scale = tl.maximum(tl.div_rn(largest, E4M3_MAX), LEAST_SCALE)
    return (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)
