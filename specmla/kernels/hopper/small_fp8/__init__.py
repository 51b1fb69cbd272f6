"""The Hopper kernel for few rows over e4m3 caches: 576 bytes a key, one scale for all.

Partitions, plan, weights and merge are those of `hopper/small/`. A stage holds the bare codes of a
block, so that four of them are under way; codes become float16 in the registers of the partition
that multiplies them, as the first operand of its products: scores [64 keys, N], outputs [256
columns, N]. Nothing that was converted is written to shared memory.

Which code of a row stands where in an operand is free as long as the other operand agrees. The
orders in `layouts.py` let a thread read 8 or 16 neighbouring codes at once, without two lanes in
one bank. Of 8 keys, key 4 a + b is row 2 b + a of a block's scores, and of its weights too.

Queries are made float16 by a power of two a row, which goes into the scale of the row's scores. The
cache's scale is in the scores' scale and in the sums that outputs are divided by.
"""
