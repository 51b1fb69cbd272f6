from __future__ import annotations

import pytest

from specmla.bench.cost import verify_cost

DEEPSEEK = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "itemsize": 2}


def test_counts_each_cached_row_once_and_every_pair_of_rows() -> None:
    cost = verify_cost([4] * 32, [8192] * 32, **DEEPSEEK)
    assert cost.cache_bytes == 32 * 8192 * 576 * 2
    assert cost.flops == 2 * (32 * 8192) * (4 * 16) * (576 + 512)


def test_ragged_batch_counts_each_request_by_itself() -> None:
    cost = verify_cost(
        [1, 3], [10, 100], num_heads=2, kv_lora_rank=4, qk_rope_head_dim=0, itemsize=4
    )
    assert cost == (110 * 4 * 4, 2 * (10 + 300) * 2 * 8)


def test_rates_against_a_published_figure() -> None:
    """98 µs at (32, 8k, 16 heads, 4 rows) are 3083 GB/s and 373 TFLOP/s in the peers' own units."""
    cost = verify_cost([4] * 32, [8192] * 32, **DEEPSEEK)
    assert cost.gbps(98.0) == pytest.approx(3083, rel=1e-3)
    assert cost.tflops(98.0) == pytest.approx(373, rel=2e-3)


def test_refuses_lists_of_different_length() -> None:
    with pytest.raises(ValueError, match="shorter"):
        verify_cost([1, 1], [5], **DEEPSEEK)
