"""Verify attention for Hopper over caches of e4m3 codes: 576 bytes a row, one scale for all.

Pieces, plan and merge are those of `hopper/`: tiles of 64 packed rows, blocks of 64 keys, a
persistent program an SM. A stage holds the bare codes of a block, so that four of them fit beside
the queries; codes become float16 in the registers of the partition that multiplies them, as the
first operand of transposed products: scores [keys, rows], outputs [latents, rows]. Nothing that was
converted is written to shared memory.

Two partitions of 4 warps attend 32 rows each and hold all 512 columns of their output. In a tile
with more than 32 rows each takes its half of the rows and all blocks; the two never talk. In a
smaller one both take the same rows, each every second block, and merge at the end of the piece.
A batch-invariant plan has the first form alone. *loads* (1 warp) brings blocks in by bulk copies.

Queries are made float16 by a power of two a row, which goes into the scale of the row's scores:
a row's numbers that float16 does not reach are 2^-24 of its largest. The cache's scale is in the
scores' scale and in the outputs' normalisation.
"""
