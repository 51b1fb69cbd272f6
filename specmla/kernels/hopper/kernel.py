"""The persistent kernel: shared memory, barriers and the three partitions."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import MBarrierLayout, init
from specmla.kernels.hopper.layouts import BLOCK, HALF, PLAIN, TILE
from specmla.kernels.hopper.left import left_partition
from specmla.kernels.hopper.loads import fetch_to_cache, load_partition
from specmla.kernels.hopper.right import right_partition

WORKER_REGISTERS = gl.constexpr([232, 40])
"""Of a thread of the second and third partition; the first gets the rest, 232."""


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
def stage_barriers_of_columns():
    """Allocate the barriers of each 64 columns: left half, right half, rope."""
    left = (stage_barriers(), stage_barriers(), stage_barriers(), stage_barriers())
    right = (stage_barriers(), stage_barriers(), stage_barriers(), stage_barriers())
    return left + right + (stage_barriers(),)


# Step tables are slices of one buffer: their alignment and width differ from step to step, and a
# specialised kernel would be compiled anew for each.
@gluon.jit(
    do_not_specialize=["scale_log2", "stride_table"],
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
def hopper_kernel(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_stat_ptr,
    q_latent_ptr,
    q_rope_ptr,
    descriptor,
    block_table_ptr,
    row_extent_ptr,
    row_start_ptr,
    tree_bits_ptr,
    program_ptr,
    entry_ptr,
    merge_ptr,
    scale_log2,
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
    """Attend the pieces of one program; see the module's text."""
    fetch_to_cache(program_ptr + gl.program_id(0) * 16)
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    q_left = gl.allocate_shared_memory(dtype, [1, BLOCK, HALF], TILE)
    q_right = gl.allocate_shared_memory(dtype, [1, BLOCK, HALF], TILE)
    q_rope = gl.allocate_shared_memory(dtype, [1, BLOCK, 64], TILE)
    k_left = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    k_right = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    k_rope = gl.allocate_shared_memory(dtype, [2, BLOCK, 64], TILE)
    weights = gl.allocate_shared_memory(dtype, [1, BLOCK, BLOCK], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK], PLAIN)
    full = stage_barriers_of_columns()
    free = (stage_barriers(), stage_barriers(), stage_barriers())
    first_max_ready = one_barrier()
    weights_ready = (one_barrier(), one_barrier())
    queries_asked = (one_barrier(), one_barrier())
    queries_ready = (one_barrier(), one_barrier())
    sums_ready = (one_barrier(), one_barrier())
    signal = (first_max_ready, weights_ready, queries_asked, queries_ready, sums_ready)
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
    attend = (target, query, tables, walk, scale_log2)
    cache = (descriptor, block_table_ptr, stride_table, merge_ptr)
    fence_async_shared()
    gl.warp_specialize(
        [
            (left_partition, (attend, shared, H, RUN, WINDOW, TREE)),
            (right_partition, (attend, shared, H, RUN, WINDOW, TREE)),
            (load_partition, (cache, walk, keys, full, free, start, H, G, RUN)),
        ],
        [4, 1],
        WORKER_REGISTERS,
    )
