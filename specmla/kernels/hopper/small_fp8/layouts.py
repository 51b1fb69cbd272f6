"""Data layouts of codes in shared memory and in registers, and of operands made of them."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

STAGES = gl.constexpr(4)
"""Blocks of codes that are under way or in use."""
PARTS = gl.constexpr(5)
"""Boxes of 128 codes of a row; half of the last lies past its end and is filled with zeros."""
WIDTH = gl.constexpr(128)
CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))
CODES_3D = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=3))
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""The same codes four at a time."""
TWO_WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))
KEY_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]],
        lane_bases=[[0, 16], [0, 32], [4, 0], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
"""Of [64 keys, 128 codes]: 16 neighbouring codes a thread."""
STEPS = gl.constexpr(2)
"""Steps of a product with the values of a block, 64 // STEPS keys each."""
VALUE_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 4, 0], [0, 8, 0], [0, 16, 0], [0, 32, 0]][
            : 8 - STEPS.value.bit_length()
        ],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 0, 8], [0, 0, 64], [0, 0, 16]],
        warp_bases=[[0, 0, 32], [1, 0, 0]],
        block_bases=[],
        shape=[2, 64 // STEPS.value, 128],
    )
)
"""Of [2 boxes, keys, 128 codes]: 8 neighbouring codes of every fourth key a thread."""
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128 // STEPS.value, 16, rank=2))


def _written(rows: int, grouped: bool) -> gl.DistributedLinearLayout:
    """Give half an output's layout whose threads have 8 neighbouring columns in a row."""

    def at(row: int, column: int) -> list[int]:
        if grouped:
            return [row // 8, row % 8, column // 8, column % 8]
        return [row, column]

    more = [8] if rows == 16 else [8, 16]
    return gl.DistributedLinearLayout(
        reg_bases=[at(0, 1), at(0, 2), at(0, 4), at(1, 0), *(at(row, 0) for row in more)],
        lane_bases=[at(2, 0), at(4, 0), at(0, 8), at(0, 64), at(0, 16)],
        warp_bases=[at(0, 32), at(0, 128)],
        block_bases=[],
        shape=[rows // 8, 8, 32, 8] if grouped else [rows, 256],
    )


OUT16, OUT32 = gl.constexpr(_written(16, False)), gl.constexpr(_written(32, False))
"""Of half an output [N, 256]: `latent_order`'s, registers sorted for stores of 16 bytes."""
PART16, PART32 = gl.constexpr(_written(16, True)), gl.constexpr(_written(32, True))
"""The same of [N // 8, 8, 32, 8], groups of 8 rows and 8 columns."""
