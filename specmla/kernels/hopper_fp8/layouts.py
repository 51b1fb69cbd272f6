"""Constants and data layouts of the Hopper kernel for e4m3 caches.

Products are transposed: a tile's rows are their columns, keys or latents their rows, so that what
is converted is the first operand and stays in registers. Which number of a row of codes stands
where in the operand is free as long as the other operand agrees; the orders here let a thread read
8 or 16 neighbouring codes at once.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

FLOOR = gl.constexpr(-1.0e30)
LN_2 = gl.constexpr(0.6931471805599453)
BLOCK = gl.constexpr(64)
"""Keys of a block, rows of a tile of the plan, and codes of a copied line."""
ROWS = gl.constexpr(32)
"""Rows of a partition: half a tile."""
STAGES = gl.constexpr(4)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
COLUMNS = gl.constexpr(gl.SliceLayout(0, MMA.value))
"""Of one number a row of the tile."""
ALL_WARPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [1, 0], [2, 0]],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, 32],
    )
)
"""Of [4 warps, 32 rows]: a thread has all warps' numbers of the rows that it has in `COLUMNS`."""
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
KEY_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
"""Of [64 keys, 64 codes]: 16 neighbouring codes a thread."""
VALUE_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 4, 0], [0, 8, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, 64],
    )
)
"""Of [4 columns of 64, 16 keys, 64 codes]: 8 neighbouring codes of 4 keys a thread."""
CODES = gl.constexpr(gl.NVMMASharedLayout(64, 8, rank=2))
CODES_3D = gl.constexpr(gl.NVMMASharedLayout(64, 8, rank=3))
WORDS = gl.constexpr(gl.NVMMASharedLayout(64, 32, rank=2))
"""The same codes four at a time."""
FOUR_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BY_WARP = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
HALVES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
"""Of half an output [32, 256] in float32, on its way to the other partition."""
