"""e2m1 codes (OCP FP4) and the scales of their groups, by comparisons and integer arithmetic.

One sign, two exponent and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity and no NaN.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

E2M1_MAX = tl.constexpr(6.0)


@triton.jit
def encode_e2m1(value):
    """Codes 0 .. 15, int32, of float32 values: nearest even, saturating, NaN to 0."""
    size = tl.abs(value)
    # Half way between two codes the even one is taken: above at 0.75, 1.75 and 3.5.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (value.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(value == value, code | sign, 0)


@triton.jit
def decode_e2m1(code):
    """Values float32 of codes 0 .. 15, int32; exact."""
    size = code & 7
    # Bias 127 instead of 1; the one subnormal is 0.5.
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    # The sign as a bit, so that a negative zero stays one.
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def join_halves(code):
    """Bytes uint8 [M, N / 2] of codes [M, N]: the even one in the low half."""
    low, high = tl.split(tl.reshape(code, [code.shape[0], code.shape[1] // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def has_nan(value):
    """Which rows of [M, N] hold a NaN, [M]."""
    return tl.max((value != value).to(tl.int32), axis=1) > 0
