"""Values of a stage as operands, the tail of a stage, and writes of outputs."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from specmla.kernels.gluon_api import arrive, barrier, view
from specmla.kernels.hopper.layouts import BLOCK, HALF
from specmla.kernels.hopper.small_fp8.convert import latent_order, value_operand
from specmla.kernels.hopper.small_fp8.layouts import (
    CODES_3D,
    OUT16,
    OUT32,
    PART16,
    PART32,
    STAGES,
    STEPS,
    TWO_WORDS,
    VALUE_CODES,
    WORDS,
)
from specmla.kernels.hopper.small_fp8.softmax import retype


@gluon.jit
def read_values(latents, stage, half: gl.constexpr, step: gl.constexpr, N: gl.constexpr):
    """Read half the columns of a step's keys of a stage as a first operand [256 columns, keys]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    K: gl.constexpr = BLOCK // STEPS
    boxes = view(latents, [STAGES * 2, 2, BLOCK, 128], CODES_3D).index(stage * 2 + half)
    return value_operand(boxes.slice(step * K, K, dim=1).load(VALUE_CODES), layout)


@gluon.jit
def add_values(acc, operand, weights, latents, free, stage, half: gl.constexpr, N: gl.constexpr):
    """Start adding a stage's values under `weights` [N, 64] to half an output [256, N].

    `operand` is that of the first step. The stage is freed when the last has been read.
    """
    K: gl.constexpr = BLOCK // STEPS
    for i in gl.static_range(STEPS):
        if i > 0:
            operand = read_values(latents, stage, half, i, N)
        if i == STEPS - 1:
            # All warps have read the codes of their products.
            barrier()
            arrive(free.index(stage))
        step = weights.slice(i * K, K, dim=1).permute((1, 0))
        acc = warpgroup_mma(operand, step, acc, is_async=True)
    return acc


@gluon.jit
def clear_tail(latents, stage, half: gl.constexpr, held, zero):
    """Zero the codes of keys at or after `held` of a stage's half: a weight of 0 times NaN is NaN.

    A loop, for fewer instructions to fetch: it runs once in a request.
    """
    # Groups of 8 keys of one box.
    words = retype(latents, gl.int32, [STAGES * 32, 8, 32], WORDS)
    key = gl.arange(0, 8, gl.SliceLayout(1, TWO_WORDS))
    for c in range(zero, 2):
        for g in range(held // 8, 8):
            group = words.index((stage * 4 + half * 2 + c) * 8 + g)
            value = group.load(TWO_WORDS)
            group.store(gl.where((key + g * 8 < held)[:, None], value, 0))
    fence_async_shared()
    barrier()


@gluon.jit
def write_out(acc, out_ptr, piece, half: gl.constexpr, H: gl.constexpr, N: gl.constexpr):
    """Write a half [256, N] of a pass to the output; a thread has 8 neighbouring columns."""
    first_row, rows, base = piece
    layout: gl.constexpr = OUT16 if N == 16 else OUT32
    values = gl.convert_layout(latent_order(acc), layout)
    row = base + gl.arange(0, N, gl.SliceLayout(1, layout))
    column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = (first_row * H + row).to(gl.int64) * (2 * HALF)
    to = out_ptr + at[:, None] + column[None, :]
    gl.store(to, values.to(out_ptr.dtype.element_ty), mask=(row < rows * H)[:, None])


@gluon.jit
def write_part(acc, part_ptr, slot, row, live_rows, half: gl.constexpr, N: gl.constexpr):
    """Write a half [256, N] of a pass, from `row` of its tile on, to its slot, as it was summed up.

    Groups of 8 rows x 8 columns lie together, as `merge.py` reads them.
    """
    layout: gl.constexpr = PART16 if N == 16 else PART32
    groups = gl.convert_layout(latent_order(acc).reshape([N // 8, 8, 32, 8]), layout)
    no3: gl.constexpr = gl.SliceLayout(3, layout)
    no32: gl.constexpr = gl.SliceLayout(2, no3)
    no31: gl.constexpr = gl.SliceLayout(1, no3)
    no21: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    r8 = gl.arange(0, N // 8, gl.SliceLayout(1, no32))
    r = gl.arange(0, 8, gl.SliceLayout(0, no32))
    c8 = gl.arange(0, 32, gl.SliceLayout(0, no31))
    c = gl.arange(0, 8, gl.SliceLayout(0, no21))
    at = (r8 * 2048)[:, None, None, None] + (r * 8)[None, :, None, None]
    at = at + (c8 * 64)[None, None, :, None] + c[None, None, None, :]
    live = row + (r8 * 8)[:, None, None, None] + r[None, :, None, None] < live_rows
    to = part_ptr + (slot.to(gl.int64) * (2 * BLOCK * HALF) + half * BLOCK * HALF + row * HALF)
    gl.store(to + at, groups, mask=live)
