"""The persistent kernel: shared memory, barriers and the three partitions."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specmla.kernels.gluon_api import MBarrierLayout, init
from specmla.kernels.hopper.kernel import one_barrier
from specmla.kernels.hopper.loads import fetch_to_cache
from specmla.kernels.hopper_fp8.attend import attend_partition
from specmla.kernels.hopper_fp8.layouts import (
    BLOCK,
    BY_WARP,
    CODES,
    PLAIN,
    QUERIES,
    ROWS,
    STAGES,
    WEIGHTS,
)
from specmla.kernels.hopper_fp8.loads import load_partition

WORKER_REGISTERS = gl.constexpr([232, 40])
"""Of a thread of the second and third partition; the first gets the rest, 232."""


@gluon.jit
def stage_barriers(count: gl.constexpr):
    """Allocate a barrier a stage that `count` arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MBarrierLayout())
    for i in gl.static_range(STAGES):
        init(bars.index(i), count=count)
    return bars


# Step tables are slices of one buffer: their alignment and width differ from step to step, and a
# specialised kernel would be compiled anew for each.
@gluon.jit(
    do_not_specialize=["scale_log2", "value_scale", "stride_table"],
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
    merge_ptr,
    scale_log2,
    value_scale,
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
    q_latent = gl.allocate_shared_memory(gl.float16, [16, ROWS, 64], QUERIES)
    q_rope = gl.allocate_shared_memory(gl.float16, [2, ROWS, 64], QUERIES)
    latents = gl.allocate_shared_memory(gl.uint8, [STAGES * 8, BLOCK, 64], CODES)
    ropes = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, 64], CODES)
    weights = gl.allocate_shared_memory(gl.float16, [2, BLOCK, ROWS], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
    by_warp = gl.allocate_shared_memory(gl.float32, [2, 4, ROWS], BY_WARP)
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS], PLAIN)
    full, free = stage_barriers(1), stage_barriers(2)
    queries_asked = (one_barrier(), one_barrier())
    sent = (one_barrier(), one_barrier())
    taken = (one_barrier(), one_barrier())
    exchange = (maxima, sums, sent, taken)
    start = (queries_asked, one_barrier(), weights)
    target = (out_ptr, lse_ptr, part_ptr, part_lse_ptr)
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
    queries = (q_latent, q_rope)
    shared = (queries, latents, ropes, weights, by_warp, exchange, full, free, queries_asked)
    attend = (target, query, tables, walk, scale_log2, value_scale)
    cache = (descriptor, block_table_ptr, stride_table, merge_ptr)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_partition, (attend, shared, 0, H, RUN, WINDOW, TREE)),
            (attend_partition, (attend, shared, 1, H, RUN, WINDOW, TREE)),
            (load_partition, (cache, walk, (latents, ropes), full, free, start, H, G, RUN)),
        ],
        [4, 1],
        WORKER_REGISTERS,
    )
