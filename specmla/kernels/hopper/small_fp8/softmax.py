"""Queries as float16, scores of codes, and weights under a scale a row."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from specmla.kernels.gluon_api import HAS_REINTERPRET, barrier, view
from specmla.kernels.hopper.layouts import BLOCK, NARROW, PLAIN
from specmla.kernels.hopper.small_fp8.convert import key_of_row, key_operand, query_order
from specmla.kernels.hopper.small_fp8.layouts import KEY_CODES

QUERY = gl.constexpr(gl.SliceLayout(1, NARROW.value))


@gluon.jit
def retype(shared, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Look at shared memory as elements of another type."""
    if HAS_REINTERPRET:
        return shared.reinterpret(dtype, shape, layout)
    else:
        return shared._reinterpret(dtype, shape, layout)


@gluon.jit
def largest_of(part):
    """Give the largest absolute value [N] of a part [N, 64] of queries."""
    return gl.max(gl.abs(part.to(gl.float32)), axis=1)


@gluon.jit
def row_power(largest, layout: gl.constexpr):
    """Exponents [N] of rows' largest numbers, both halves of which are in `largest` [2, N]."""
    top = gl.maximum(largest.index(0).load(layout), largest.index(1).load(layout))
    power = top.to(gl.int32, bitcast=True) >> 23
    return gl.minimum(gl.maximum(power, 64), 253)


@gluon.jit
def power_down(power):
    """Give factors [N] that bring rows' largest numbers to [1, 2)."""
    return ((254 - power) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def power_up(power):
    """Give the inverses of `power_down`."""
    return (power << 23).to(gl.float32, bitcast=True)


@gluon.jit
def put_scaled(to, part, down, c: gl.constexpr):
    """Store part `c` of a half of queries to shared memory, in the order of key operands."""
    value = query_order((part.to(gl.float32) * down[:, None]).to(gl.float16))
    to.slice(c * 64, 64, dim=1).store(value)


@gluon.jit
def score(queries, codes, stage, zero, N: gl.constexpr):
    """Scores [64 keys, N] of a stage; the order of keys is that of `key_of_row`.

    `zero` is 0, which the compiler must not know, for a loop that it does not unroll: code that
    leaves the caches of instructions costs more than the loop's waits.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    q_halves, q_rope = queries
    latents, ropes = codes
    s = gl.zeros([BLOCK, N], gl.float32, layout)
    rope = ropes.index(stage).load(KEY_CODES)
    rope, _none = gl.split(rope.reshape([BLOCK, 2, 64]).permute((0, 2, 1)))
    rope_operand = key_operand(rope, layout)
    s = warpgroup_mma(rope_operand, q_rope.index(zero).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    for h in range(zero, 2):
        for c in gl.static_range(2):
            operand = key_operand(latents.index(stage * 4 + h * 2 + c).load(KEY_CODES), layout)
            q = q_halves.index(h).slice(c * 128, 128, dim=1).permute((1, 0))
            s = warpgroup_mma(operand, q, s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    return s


@gluon.jit
def largest_scores(s, of_warps, side: gl.constexpr, N: gl.constexpr):
    """Largest scores [N] over the keys of a block; each of the 4 warps holds 16 keys.

    The memory of the sums [2, 4, N] serves it, which are sent when all blocks have been scored.
    """
    rows: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    of_warps.index(side).store(gl.max(s.reshape([4, 16, N]), axis=1))
    barrier()
    each = view(of_warps, [8, N], PLAIN)
    first, second = each.index(side * 4).load(rows), each.index(side * 4 + 1).load(rows)
    third, last = each.index(side * 4 + 2).load(rows), each.index(side * 4 + 3).load(rows)
    return gl.maximum(gl.maximum(first, second), gl.maximum(third, last))


@gluon.jit
def weigh(s, row_max, scale):
    """Weights exp2(scores * scale - maximum) [64 keys, N] in float32; `scale` is [N]."""
    return gl.exp2(gl.fma(s, scale[None, :], -row_max[None, :]))


@gluon.jit
def hide_keys(s, b, prefix, limits, WINDOW: gl.constexpr, TREE: gl.constexpr):
    """Set the scores of unseen keys of block `b` to -inf, where there are any."""
    extent, first_key, word, safe_begin, safe_end = limits
    if ((b + 1) * BLOCK > safe_end) | (b * BLOCK < safe_begin):
        row = gl.arange(0, BLOCK, gl.SliceLayout(1, s.type.layout))
        key = b * BLOCK + key_of_row(row)
        seen = key[:, None] < extent[None, :]
        if WINDOW:
            seen = seen & (key[:, None] >= first_key[None, :])
        if TREE:
            node = gl.minimum(gl.maximum(key - prefix, 0), 63).to(gl.int64)
            bit = (word[None, :] >> node[:, None]) & 1
            seen = seen & ((key < prefix)[:, None] | (bit != 0))
        s = gl.where(seen, s, float("-inf"))
    return s
