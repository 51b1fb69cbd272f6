"""The persistent kernel for e4m3 caches: shared memory, barriers and the three partitions."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import MBarrierLayout, init
from specmla.kernels.hopper.kernel import one_barrier
from specmla.kernels.hopper.layouts import BLOCK, HALF, PLAIN, TILE
from specmla.kernels.hopper.loads import fetch_to_cache
from specmla.kernels.hopper.small.softmax import OF_WARPS
from specmla.kernels.hopper.small_fp8.layouts import CODES, STAGES, WEIGHTS, WIDTH
from specmla.kernels.hopper.small_fp8.left import left_partition
from specmla.kernels.hopper.small_fp8.loads import load_partition
from specmla.kernels.hopper.small_fp8.right import right_partition

WORKERS = gl.constexpr([232, 40])
"""Of a thread of the second and third partition; the first gets the rest, 232."""
REGISTERS = 168
"""Registers a thread at launch; the partitions redistribute them."""


@gluon.jit
def stage_barriers(count: gl.constexpr):
    """Allocate a barrier a stage that `count` arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MBarrierLayout())
    for i in gl.static_range(STAGES):
        init(bars.index(i), count=count)
    return bars


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
def small_fp8_kernel(
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
    sum_scale,
    max_shift,
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
    """Attend the pieces of one program, N rows a pass; see the package's text."""
    fetch_to_cache(program_ptr + gl.program_id(0) * 16)
    q_halves = gl.allocate_shared_memory(gl.float16, [2, N, HALF], TILE)
    q_rope = gl.allocate_shared_memory(gl.float16, [1, N, 64], TILE)
    latents = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, BLOCK, WIDTH], CODES)
    ropes = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, WIDTH], CODES)
    weights = gl.allocate_shared_memory(gl.float16, [3, N, BLOCK], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [3, N], PLAIN)
    of_warps = gl.allocate_shared_memory(gl.float32, [2, 4, N], OF_WARPS)
    full, free = stage_barriers(1), stage_barriers(2)
    weights_ready = (one_barrier(), one_barrier())
    queries_asked = (one_barrier(), one_barrier())
    largest_ready = (one_barrier(), one_barrier())
    queries_ready = (one_barrier(), one_barrier())
    sums_ready = (one_barrier(), one_barrier())
    signal = (weights_ready, queries_asked, largest_ready, queries_ready, sums_ready)
    start = (queries_asked, one_barrier())
    queries = (q_halves, q_rope)
    codes = (latents, ropes)
    exchange = (weights, maxima, of_warps)
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
    shared = (queries, codes, exchange, full, free, signal)
    attend = (target, query, tables, walk, (scale_log2, sum_scale, max_shift))
    cache = (descriptor, block_table_ptr, stride_table, merge_ptr)
    fence_async_shared()
    gl.warp_specialize(
        [
            (left_partition, (attend, shared, H, WINDOW, TREE, N)),
            (right_partition, (attend, shared, H, WINDOW, TREE, N)),
            (load_partition, (cache, walk, codes, full, free, start, H, G, N)),
        ],
        [4, 1],
        WORKERS,
    )
