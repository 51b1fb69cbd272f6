"""Device helpers: the counter-based random numbers of `specmla.verify.streams`, bit for bit."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

ACCEPT = tl.constexpr(1 << 56)
CORRECTION = tl.constexpr(2 << 56)
TARGET = tl.constexpr(3 << 56)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _hash(key, field):
    return _mix(key + (field + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def uniform(seed, position, row, STREAM: tl.constexpr):
    """Give float64 numbers in (0, 1) of int64 seeds and anchor positions, and rows of a stream."""
    word = position * 0 + row + STREAM
    key = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    z = _hash(_hash(key, position), word)
    return ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
