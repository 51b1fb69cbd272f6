"""Verify attention for Hopper, warp-specialised: latent 512 + rope 64, tiles of 64 packed rows.

One persistent program an SM walks the pieces that `schedule.py` gave it. Three partitions share it:
*scores* (4 warps) computes S = Q K^T and the softmax, publishes the weights P and the factor each
row shrinks by, and accumulates the left 256 columns of the output; *values* (4 warps) accumulates
the right 256 from the published weights; *loads* (1 warp) brings 64-key stages in by bulk copies. A
stage has three parts with barriers of their own, rope, left and right, so that each is refilled
right after its last use.
"""
