"""Reading cached rows into memory that is there already."""

from __future__ import annotations

import pytest
import torch

from specmla.cache import LatentCache
from specmla.errors import ArgumentError

N, G, A = 6, 5, 24


def make(impl: str, is_gapped: bool) -> LatentCache:
    pool = torch.randn(N, G * A + (A + 1 if is_gapped else 0))
    return LatentCache.from_pool([pool[:, : G * A].unflatten(1, (G, A))], impl)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("is_gapped", [False, True])
def test_gather_into_a_slice_gives_the_same_rows_and_writes_no_other(
    impl: str, is_gapped: bool
) -> None:
    cache = make(impl, is_gapped)
    for slots in (torch.tensor([29, 0, 7, 7]), torch.tensor([3, -1]), torch.tensor([]).long()):
        buffer = torch.full((8, A), 7.0)
        into = buffer[: len(slots)]
        got = cache.gather(0, slots, into)
        assert got.data_ptr() == into.data_ptr()
        assert torch.equal(into, cache.gather(0, slots))
        assert (buffer[len(slots) :] == 7.0).all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gather_refuses_memory_that_can_not_take_the_rows(impl: str) -> None:
    cache, slots = make(impl, False), torch.tensor([0, 1])
    for out in (
        torch.zeros(3, A),
        torch.zeros(2, A).double(),
        torch.zeros(A, 2).t(),
        torch.zeros(2, A + 8)[:, :A],
    ):
        with pytest.raises(ArgumentError, match=r"out is .*; accepted is \(2, 24\), contiguous"):
            cache.gather(0, slots, out)
    with pytest.raises(ArgumentError, match=r"slots go from 0 to 99.*; out is"):
        cache.gather(0, torch.tensor([0, 99]), torch.zeros(3, A))
