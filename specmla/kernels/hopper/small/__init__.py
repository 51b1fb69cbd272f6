"""The Hopper kernel for few rows: at most 16 or 32 packed rows a pass, on the mma's columns.

Scores are computed as [64 keys, N rows] and the output as [256 columns, N rows] a partition: no
instruction has dead rows, and for 16 rows a program takes 128 registers a thread instead of 168, so
that a program of the merge after it fits beside it. Partitions, stages and barriers are
those of the parent package, except that the second block's weights have memory of their own.

Tiles of the plan have 64 rows. One with more than N is attended in passes, each over all keys: any
split of the rows over the requests is right, and one of few rows each is fast.
"""
