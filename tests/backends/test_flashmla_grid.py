"""The grid of FlashMLA's dense decode tests: batch, rows, keys, heads, ragged, causal or not.

It has one KV head, as MLA does. An empty request gives LSE -inf here, where FlashMLA gives +inf.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from specmla.backends.reference import ReferenceBackend
from specmla.mask import DraftMask
from specmla.testing import assert_matches_oracle, make_case

HEADS = (1, 3, 9, 63, 64, 126, 128)
UNUSED_CELL = 2_147_480_000


def batch(count: int, rows: int, keys: int, *, is_ragged: bool) -> list[tuple[int, int]]:
    draw = random.Random(count * 10_000 + keys)
    return [(rows, draw.randint(rows, keys) if is_ragged else keys) for _ in range(count)]


def check(lens: list[tuple[int, int]], num_heads: int, mask: DraftMask, **options: Any) -> None:
    case = make_case(lens, num_heads=num_heads, mask=mask, unused_cell=UNUSED_CELL, **options)
    assert_matches_oracle(case.attend(ReferenceBackend()), case, case.tables())


@pytest.mark.parametrize("mask", [DraftMask.CAUSAL, DraftMask.FULL])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("num_heads", HEADS)
def test_short_requests(num_heads: int, rows: int, is_ragged: bool, mask: DraftMask) -> None:
    for count in (1, 2, 6):
        for keys in (20, 140):
            check(batch(count, rows, keys, is_ragged=is_ragged), num_heads, mask)


@pytest.mark.parametrize("mask", [DraftMask.CAUSAL, DraftMask.FULL])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("num_heads", [1, 63, 128])
def test_long_requests(num_heads: int, rows: int, mask: DraftMask) -> None:
    check(batch(2, rows, 4096, is_ragged=True), num_heads, mask)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_batch_of_64(rows: int, is_ragged: bool) -> None:
    check(batch(64, rows, 140, is_ragged=is_ragged), 9, DraftMask.CAUSAL)


def test_batch_of_128_with_empty_requests() -> None:
    """Rows of a request without a single key; latents are narrower for memory's sake."""
    lens = [(2, 0 if i % 5 == 0 else 4096 - 31 * i) for i in range(128)]
    check(lens, 3, DraftMask.CAUSAL, kv_lora_rank=16, rope_dim=8)
