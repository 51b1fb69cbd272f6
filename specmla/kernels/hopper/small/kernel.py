"""The persistent kernel for few rows: shared memory, barriers and the three partitions."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.hopper.kernel import one_barrier, stage_barriers, stage_barriers_of_columns
from specmla.kernels.hopper.layouts import BLOCK, HALF, PLAIN, TILE
from specmla.kernels.hopper.loads import fetch_to_cache
from specmla.kernels.hopper.small.left import left_partition
from specmla.kernels.hopper.small.loads import load_partition
from specmla.kernels.hopper.small.right import right_partition
from specmla.kernels.hopper.small.softmax import OF_WARPS

WORKERS16 = gl.constexpr([160, 56])
WORKERS32 = gl.constexpr([216, 56])
REGISTERS = {16: 128, 32: 168}
"""Registers a thread at launch by N; the partitions redistribute them."""


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
def small_kernel(
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
    WINDOW: gl.constexpr,
    TREE: gl.constexpr,
    N: gl.constexpr,
):
    """Attend the pieces of one program, N rows a pass; see the module's text."""
    fetch_to_cache(program_ptr + gl.program_id(0) * 16)
    dtype: gl.constexpr = q_latent_ptr.dtype.element_ty
    WORKERS: gl.constexpr = WORKERS16 if N == 16 else WORKERS32
    q_left = gl.allocate_shared_memory(dtype, [1, N, HALF], TILE)
    q_right = gl.allocate_shared_memory(dtype, [1, N, HALF], TILE)
    q_rope = gl.allocate_shared_memory(dtype, [1, N, 64], TILE)
    k_left = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    k_right = gl.allocate_shared_memory(dtype, [2, BLOCK, HALF], TILE)
    k_rope = gl.allocate_shared_memory(dtype, [2, BLOCK, 64], TILE)
    first_weights = gl.allocate_shared_memory(dtype, [1, N, BLOCK], TILE)
    second_weights = gl.allocate_shared_memory(dtype, [1, N, BLOCK], TILE)
    maxima = gl.allocate_shared_memory(gl.float32, [2, N], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, 4, N], OF_WARPS)
    left_warps = gl.allocate_shared_memory(gl.float32, [1, 4, N], OF_WARPS)
    right_warps = gl.allocate_shared_memory(gl.float32, [1, 4, N], OF_WARPS)
    full = stage_barriers_of_columns()
    free = (stage_barriers(), stage_barriers(), stage_barriers())
    weights_ready = (one_barrier(), one_barrier())
    queries_asked = (one_barrier(), one_barrier())
    queries_ready = (one_barrier(), one_barrier())
    sums_ready = (one_barrier(), one_barrier())
    signal = (weights_ready, queries_asked, queries_ready, sums_ready)
    start = (queries_asked, one_barrier())
    queries = (q_left, q_right, q_rope)
    keys = (k_left, k_right, k_rope)
    exchange = ((first_weights, second_weights), maxima, sums, (left_warps, right_warps))
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
            (left_partition, (attend, shared, H, WINDOW, TREE, N)),
            (right_partition, (attend, shared, H, WINDOW, TREE, N)),
            (load_partition, (cache, walk, keys, full, free, start, H, G, N)),
        ],
        [4, 1],
        WORKERS,
    )
