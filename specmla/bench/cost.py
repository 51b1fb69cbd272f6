"""What a verify must move and compute at least: the denominators of the reported rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """cache_bytes: latent rows, each counted once. flops: of the absorbed form, all rows."""

    cache_bytes: int
    flops: int

    def gbps(self, us: float) -> float:
        """Unique cache bytes per time, in GB/s (10^9)."""
        return self.cache_bytes / us / 1e3

    def tflops(self, us: float) -> float:
        """Floating-point operations per time, in TFLOP/s (10^12)."""
        return self.flops / us / 1e6


def verify_cost(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    itemsize: int,
) -> Cost:
    """Count the work of one layer's verify.

    A query row and a cached row of A = C + R values meet in 2 (A + C) operations: a dot product
    over A, an update over C. The few keys that a causal or tree mask hides are counted as well, as
    is usual, so that figures compare across masks.

    Args:
        query_lens: rows Q of each request.
        seq_lens: cached tokens S of each request, new ones included.
        num_heads: H.
        kv_lora_rank: C.
        qk_rope_head_dim: R.
        itemsize: bytes of a cached value.
    """
    width = kv_lora_rank + qk_rope_head_dim
    pairs = sum(q * s for q, s in zip(query_lens, seq_lens, strict=True))
    return Cost(
        cache_bytes=sum(seq_lens) * width * itemsize,
        flops=2 * pairs * num_heads * (width + kv_lora_rank),
    )
