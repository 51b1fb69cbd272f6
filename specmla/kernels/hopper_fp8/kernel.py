"""The persistent kernel: shared memory, barriers and the three partitions."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import MBarrierLayout, init, view
from specmla.kernels.hopper.kernel import (
    one_barrier,
    stage_barriers,
    stage_barriers_of_columns,
)
from specmla.kernels.hopper.layouts import BLOCK, HALF, PLAIN, TILE
from specmla.kernels.hopper.left import left_partition
from specmla.kernels.hopper.loads import fetch_to_cache
from specmla.kernels.hopper.right import right_partition
from specmla.kernels.hopper_fp8.convert import GROUP
from specmla.kernels.hopper_fp8.loads import bring_partition

WORKER_REGISTERS = gl.constexpr([224, 56])
"""Of a thread of the second and third partition; the first gets the rest, 224."""


@gluon.jit
def raw_barriers():
    """Allocate the barriers of arriving codes: by stage and group of columns, of rope by stage."""
    bars = gl.allocate_shared_memory(gl.int64, [16 // GROUP, 1], MBarrierLayout())
    for i in gl.static_range(16 // GROUP):
        init(bars.index(i), count=1)
    return bars, stage_barriers()


# Step tables are slices of one buffer: their alignment and width differ from step to step, and a
# specialised kernel would be compiled anew for each.
@gluon.jit(
    do_not_specialize=["scale_log2", "sum_scale", "max_shift", "stride_table"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "row_extent_ptr",
        "row_start_ptr",
        "tree_bits_ptr",
        "program_ptr",
        "entry_ptr",
        "merge_ptr",
    ],
)
def hopper_fp8_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_stat_ptr,
    q_latent_ptr,
    q_rope_ptr,
    descriptor,
    cache_ptr,
    block_table_ptr,
    row_extent_ptr,
    row_start_ptr,
    tree_bits_ptr,
    program_ptr,
    entry_ptr,
    merge_ptr,
    scale_log2,
    sum_scale,
    max_shift,
    stride_page,
    stride_table,
    stride_latent_t,
    stride_latent_h,
    stride_rope_t,
    stride_rope_h,
    H: gl.constexpr,
    G: gl.constexpr,
    RUN: gl.constexpr,
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
):
    """Attend the pieces of one program; see the package's text."""
    fetch_to_cache(program_ptr + gl.program_id(0) * 16)
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [1, BLOCK, HALF], TILE)
    q_right = gl.allocate_shared_memory(dtype, [1, BLOCK, HALF], TILE)
    q_rope = gl.allocate_shared_memory(dtype, [1, BLOCK, 64], TILE)
    # One allocation for both halves, so that one loop converts the columns of both.
    latents = gl.allocate_shared_memory(dtype, [2, 8 * BLOCK, 64], TILE)
    k_left = view(latents.index(0), [2, BLOCK, HALF], TILE)
    k_right = view(latents.index(1), [2, BLOCK, HALF], TILE)
    k_rope = gl.allocate_shared_memory(dtype, [2, BLOCK, 64], TILE)
    weights = gl.allocate_shared_memory(dtype, [1, BLOCK, BLOCK], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK], PLAIN)
    full = stage_barriers_of_columns()
    raw, raw_rope = raw_barriers()
    free = (stage_barriers(), stage_barriers(), stage_barriers())
    weights_ready = (one_barrier(), one_barrier())
    queries_asked = (one_barrier(), one_barrier())
    queries_ready = (one_barrier(), one_barrier())
    sums_ready = (one_barrier(), one_barrier())
    signal = (weights_ready, queries_asked, queries_ready, sums_ready)
    start = (queries_asked, one_barrier(), weights)
    queries = (q_left, q_right, q_rope)
    keys = (k_left, k_right, k_rope)
    exchange = (weights, maxima, sums)
    target = (out_ptr, lse_ptr, part_ptr, part_stat_ptr)
    query = (
        q_latent_ptr,
        q_rope_ptr,
        stride_latent_t,
        stride_latent_h,
        stride_rope_t,
        stride_rope_h,
    )
    tables = (row_extent_ptr, row_start_ptr, tree_bits_ptr)
    walk = (program_ptr, entry_ptr)
    shared = (queries, keys, exchange, full, free, signal)
    attend = (target, query, tables, walk, scale_log2, (sum_scale, max_shift))
    cache = (descriptor, cache_ptr, stride_page, block_table_ptr, stride_table, merge_ptr)
    arriving = (raw, raw_rope, free[0], free[2])
    converting = (raw, raw_rope, full, free[1])
    bringing = (arriving, converting)
    fence_async_shared()
    gl.warp_specialize(
        [
            (left_partition, (attend, shared, H, RUN, WINDOW, TREE)),
            (right_partition, (attend, shared, H, RUN, WINDOW, TREE)),
            (bring_partition, (cache, walk, (latents, k_rope), bringing, start, H, G, RUN)),
        ],
        [4, 4],
        WORKER_REGISTERS,
    )
