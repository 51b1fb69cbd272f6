"""Verify attention for Hopper over caches of e4m3 codes: 576 bytes a row, one scale for all.

Pieces, plan, merge and the two partitions that attend are those of `hopper/`: they find keys of the
query's dtype in their stages. What fills the stages is *bring* (4 warps): bulk copies put the codes
of a block into the stage's own memory, half of which they take, and are then converted in place.
The cache is read once, at a byte a number, and no stage is needed beyond the two.

A stage is free for codes part by part, as for 16-bit keys: those of the latents lie in the right
part, of the rope in the rope part; the left part is needed first when it is written. Codes of the
pair of blocks after this one are asked for in L2 meanwhile, as two stages hold nothing ahead.

The cache's scale is in the scores' scale; for outputs the sums of weights are divided by it.
"""
