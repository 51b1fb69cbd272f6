"""Verify attention for Hopper, warp-specialised: latent 512 + rope 64, tiles of 64 packed rows.

One persistent program an SM walks the pieces that `schedule.py` gave it, blocks of 64 keys in
pairs. Three partitions share it. *left* (4 warps) computes scores and softmax of the first block
of a pair and accumulates the left 256 columns of the output, *right* (4 warps) does so for the
second block and the right 256: each publishes its weights and its running maximum to the other.
*loads* (1 warp) brings blocks in by bulk copies. Each of a block's three parts, rope, left and
right, is refilled right after its last use, and has a barrier a 64 columns for what has landed:
scores start with the first of them. The second block's weights lie in its rope part, used by then.

Who waits for whom, a pair long: left scores A, publishes A; right scores B, takes A (values A),
publishes B, values B; left values A, takes B, values B. One barrier a direction suffices because
neither side can publish twice before the other has taken the first; sums and queries, which end
and start a piece, have barriers of their own, as after an odd last block they would come too early.
"""
