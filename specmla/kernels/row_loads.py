"""Device helpers that load blocks of cache rows, plain or as e4m3 codes, for the products."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = -1
"""GROUP of rows that are numbers of the query's dtype."""


@triton.jit
def small_e4m3(code):
    """Values float16 of uint8 codes, in 16-bit arithmetic; exact, as `decode_e4m3` is."""
    bits = code.to(tl.int16)
    # Bias 15 instead of 7; subnormals are float16's too.
    moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    value = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def load_codes(
    row_at, columns, held, dtype: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr
):
    """Numbers [N, D] in `dtype` of the codes at `columns` [1, D] of rows at `row_at` [N, 1].

    GROUP columns share a float32 scale; the first lies SCALES bytes into the row. 0: no scale.
    Rows that are not `held` [N, 1] are zeros.
    """
    value = small_e4m3(tl.load(row_at + columns, mask=held, other=0))
    if GROUP > 0:
        scales_at = (row_at + SCALES).to(tl.pointer_type(tl.float32), bitcast=True)
        if columns.shape[1] > GROUP:
            count: tl.constexpr = columns.shape[1] // GROUP
            scale = tl.load(scales_at + tl.arange(0, count)[None, :], mask=held, other=0.0)
            shape: tl.constexpr = [row_at.shape[0], count, GROUP]
            scale = tl.broadcast_to(scale[:, :, None], shape)
            value = value * tl.reshape(scale, [row_at.shape[0], columns.shape[1]])
        else:
            value = value * tl.load(scales_at, mask=held, other=0.0)
    return value.to(dtype)


@triton.jit
def load_latent(
    row_at, columns, held, dtype: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr
):
    """Latents [N, C] of rows at `row_at` [N, 1]; rows that are not `held` are zeros."""
    if GROUP < 0:
        return tl.load(row_at + columns, mask=held, other=0.0)
    else:
        return load_codes(row_at, columns, held, dtype, GROUP, SCALES)


@triton.jit
def load_rope(
    row_at,
    columns,
    held,
    dtype: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Rotated keys [N, R] of rows at `row_at`: after C columns, or bf16 from byte ROPE on."""
    if GROUP < 0:
        return tl.load(row_at + C + columns, mask=held, other=0.0)
    elif ROPE > 0:
        rope_at = (row_at + ROPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        return tl.load(rope_at + columns, mask=held, other=0.0).to(tl.float32).to(dtype)
    else:
        return load_codes(row_at, C + columns, held, dtype, GROUP, SCALES)
