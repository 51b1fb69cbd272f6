"""Scores of a stage and the arithmetic of a running softmax."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from specmla.kernels.gluon_api import view, wait
from specmla.kernels.hopper.layouts import BLOCK, S_LAYOUT, TILE
from specmla.kernels.hopper.shrink import SHRINK, SHRINK_OPERANDS, SHRINK_PACK


@gluon.jit
def score(queries, keys, full, stage, phase, zero):
    """Scores [64, 64] of a stage, each 64 columns as soon as they have landed.

    `zero` is 0, which the compiler must not know: it would keep the queries' matrix descriptors
    in registers over the whole loop.
    """
    k_left, k_right, k_rope = keys
    columns = (view(k_left, [8, BLOCK, 64], TILE), view(k_right, [8, BLOCK, 64], TILE))
    s = gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT)
    wait(full[8].index(stage), phase)
    k = k_rope.index(stage).permute((1, 0))
    s = warpgroup_mma(queries[2].index(zero), k, s, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        q = view(queries[half], [4, BLOCK, 64], TILE)
        for c in gl.static_range(4):
            wait(full[half * 4 + c].index(stage), phase)
            k = columns[half].index(stage * 4 + c).permute((1, 0))
            s = warpgroup_mma(q.index(zero + c), k, s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def weigh(s, row_max, scale_log2):
    """Weights exp2(scaled scores - maximum) [64, 64] in float32."""
    return gl.exp2(gl.fma(s, gl.full_like(s, scale_log2), -row_max[:, None]))


@gluon.jit
def fold(p):
    """Sum the columns that a thread holds: [64, 64] to [64, 4], without talking to other lanes."""
    return gl.sum(gl.sum(p.reshape([BLOCK, 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def scale_rows(x, factor):
    """Multiply the rows of `x` [64, N] by `factor` [64], whose layout differs in name only."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def shrink_rows(x, factor):
    """Multiply the rows of an accumulator [64, 256] by `factor` [64], if any of a warp's isn't 1.

    Most maxima stand after the first blocks. A warp that has no new one saves 128 products a
    thread, and at many rows the power that they take, which is what bounds the clock there. The
    bits are the same: a product with 1 is exact.
    """
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    rows = gl.convert_layout(factor, layout, assert_trivial=True)[:, None]
    _, rows = gl.broadcast(x, rows)
    return gl.inline_asm_elementwise(
        SHRINK, SHRINK_OPERANDS, [x, rows], dtype=gl.float32, is_pure=True, pack=SHRINK_PACK
    )
