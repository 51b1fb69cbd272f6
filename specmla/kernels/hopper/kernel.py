"""The persistent kernel: shared memory, barriers and the three partitions."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import MBarrierLayout, init
from specmla.kernels.hopper.layouts import BLOCK, HALF, PLAIN, TILE
from specmla.kernels.hopper.loads import load_partition
from specmla.kernels.hopper.scores import score_partition
from specmla.kernels.hopper.values import value_partition


@gluon.jit
def one_barrier():
    """Allocate a barrier that one arrival completes.

    Each has an allocation of its own: the compiler synchronises accesses to one allocation.
    """
    bar = gl.allocate_shared_memory(gl.int64, [1], MBarrierLayout())
    init(bar, count=1)
    return bar


@gluon.jit
def stage_barriers():
    """Allocate one barrier a stage."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], MBarrierLayout())
    for i in gl.static_range(2):
        init(bars.index(i), count=1)
    return bars


@gluon.jit
def hopper_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    q_latent_ptr,
    q_rope_ptr,
    descriptor,
    block_table_ptr,
    row_extent_ptr,
    row_start_ptr,
    tree_bits_ptr,
    program_ptr,
    entry_ptr,
    scale_log2,
    stride_table,
    stride_latent_t,
    stride_latent_h,
    stride_rope_t,
    stride_rope_h,
    H: gl.constexpr,
    G: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Attend the pieces of one program; see the module's text."""
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [BLOCK, HALF], TILE)
    q_right = gl.allocate_shared_memory(dtype, [BLOCK, HALF], TILE)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK, 64], TILE)
    k_left = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    k_right = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    k_rope = gl.allocate_shared_memory(dtype, [2, BLOCK, 64], TILE)
    weights = gl.allocate_shared_memory(dtype, [BLOCK, BLOCK], TILE)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK], PLAIN)
    full = (stage_barriers(), stage_barriers(), stage_barriers())
    free = (stage_barriers(), stage_barriers(), stage_barriers())
    signal = (one_barrier(), one_barrier(), one_barrier(), one_barrier())
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                score_partition,
                (
                    out_ptr,
                    lse_ptr,
                    part_ptr,
                    part_lse_ptr,
                    q_latent_ptr,
                    q_rope_ptr,
                    row_extent_ptr,
                    row_start_ptr,
                    tree_bits_ptr,
                    program_ptr,
                    entry_ptr,
                    scale_log2,
                    stride_latent_t,
                    stride_latent_h,
                    stride_rope_t,
                    stride_rope_h,
                    q_left,
                    q_right,
                    q_rope,
                    k_left,
                    k_right,
                    k_rope,
                    weights,
                    factors,
                    full,
                    free,
                    signal,
                    H,
                    WINDOW,
                    TREE,
                ),
            ),
            (
                value_partition,
                (
                    out_ptr,
                    part_ptr,
                    q_latent_ptr,
                    program_ptr,
                    entry_ptr,
                    stride_latent_t,
                    stride_latent_h,
                    q_right,
                    k_right,
                    weights,
                    factors,
                    free,
                    signal,
                    H,
                ),
            ),
            (
                load_partition,
                (
                    descriptor,
                    block_table_ptr,
                    stride_table,
                    program_ptr,
                    entry_ptr,
                    k_left,
                    k_right,
                    k_rope,
                    full,
                    free,
                    H,
                    G,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )
