"""Scores of a block and its product with the weights, codes converted on the way."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from specmla.kernels.gluon_api import barrier, view
from specmla.kernels.hopper_fp8.convert import key_operand, value_operand
from specmla.kernels.hopper_fp8.layouts import (
    ALL_WARPS,
    BLOCK,
    CODES_3D,
    COLUMNS,
    KEY_CODES,
    MMA,
    ROWS,
    STAGES,
    VALUE_CODES,
)
from specmla.kernels.hopper_fp8.tiles import query_part


@gluon.jit
def score(queries, latents, ropes, stage, W: gl.constexpr, zero):
    """Scores [64 keys, 32 rows] of a stage for partition `W`.

    The next codes are read while the tensor cores work; two operands are in flight. `zero` is 0,
    which the compiler must not know: it would keep all matrix descriptors in registers.
    """
    s = gl.zeros([BLOCK, ROWS], gl.float32, MMA)
    codes = ropes.index(stage).load(KEY_CODES)
    for c in gl.static_range(9):
        operand = key_operand(codes)
        q = query_part(queries, c, W, zero).permute((1, 0))
        s = warpgroup_mma(operand, q, s, use_acc=c > 0, is_async=True)
        if c < 8:
            codes = latents.index(stage * 8 + c).load(KEY_CODES)
            s = warpgroup_mma_wait(1, deps=[s])
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def add_values(left, right, weights, latents, stage):
    """Add a stage's values under `weights` [64 keys, 32 rows] to the halves [256, 32]."""
    halves = view(latents, [STAGES * 2, 4, BLOCK, 64], CODES_3D)
    codes = halves.index(stage * 2).slice(0, 16, dim=1).load(VALUE_CODES)
    for step in gl.static_range(4):
        w = weights.slice(step * 16, 16, dim=0)
        operand = value_operand(codes)
        left = warpgroup_mma(operand, w, left, is_async=True)
        codes = halves.index(stage * 2 + 1).slice(step * 16, 16, dim=1).load(VALUE_CODES)
        if step > 0:
            right = warpgroup_mma_wait(1, deps=[right])
        operand = value_operand(codes)
        right = warpgroup_mma(operand, w, right, is_async=True)
        if step < 3:
            codes = halves.index(stage * 2).slice(step * 16 + 16, 16, dim=1).load(VALUE_CODES)
        left = warpgroup_mma_wait(1, deps=[left])
    return left, warpgroup_mma_wait(0, deps=[right])


@gluon.jit
def largest(s, by_warp):
    """Give the largest score of each row [32], of [64 keys, 32 rows].

    Each warp leaves its 16 keys' in `by_warp` [4, 32], and all read all: one barrier instead of the
    two of a general reduction.
    """
    by_warp.store(gl.max(s.reshape([4, 16, ROWS]), axis=1))
    barrier()
    return gl.convert_layout(gl.max(by_warp.load(ALL_WARPS), axis=0), COLUMNS, assert_trivial=True)


@gluon.jit
def fold(p):
    """Sum the keys that a thread holds: [64, 32] to [4, 8, 32], without talking to other lanes."""
    return gl.sum(p.reshape([4, 2, 8, ROWS]), axis=1)


@gluon.jit
def scale_columns(x, factor):
    """Multiply the columns of `x` [..., 32] by `factor` [32], whose layout differs in name only."""
    if len(x.shape) == 3:
        layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, x.type.layout))
        return x * gl.convert_layout(factor, layout, assert_trivial=True)[None, None, :]
    else:
        return x * gl.convert_layout(factor, COLUMNS, assert_trivial=True)[None, :]
