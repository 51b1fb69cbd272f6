"""LatentCache against a dictionary of rows, for every implementation that runs here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmla.cache import LatentCache

L, N, G, C, R = 3, 7, 5, 24, 8
A = C + R
IMPLS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(
    impl: str, kind: str, page_size: int = G, dtype: torch.dtype = torch.float32
) -> LatentCache:
    if kind == "owned":
        cache = LatentCache(L, N, page_size, A, dtype, DEVICE, impl)
    elif kind == "interleaved":
        pool = torch.empty(N, L, page_size, A, dtype=dtype, device=DEVICE)
        cache = LatentCache.from_pool([pool[:, i] for i in range(L)], impl)
    else:  # allocations of their own, with a gap of half a page and an odd distance
        views = []
        for i in range(L):
            whole = torch.empty(N * (page_size * A + 3 * A) + i, dtype=dtype, device=DEVICE)
            stride = (page_size * A + 3 * A, A, 1)
            views.append(whole.as_strided((N, page_size, A), stride, i))
        cache = LatentCache.from_pool(views, impl)
    for i in range(L):
        cache.layer(i).fill_(float("nan"))
    return cache


def tensor(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def random_rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, device=DEVICE).to(dtype)


def all_rows(cache: LatentCache, layer: int) -> Tensor:
    """Every slot's row in slot order, read without the cache's own operations."""
    return cache.layer(layer).clone().reshape(cache.num_slots, cache.width)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, NaN included."""
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["owned", "interleaved", "separate"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("rope", [0, 8])
def test_store_writes_the_named_rows_and_nothing_else(
    impl: str, kind: str, page_size: int, rope: int
) -> None:
    cache = make(impl, kind, page_size)
    last = cache.num_slots - 1
    slots = [last, -1, 0, 3, -1, 2]
    latent, rotated = random_rows(6, A - rope), random_rows(6, rope)
    before = [all_rows(cache, i) for i in range(L)]
    cache.store(1, latent, rotated, tensor(slots))
    expected = before[1].clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = torch.cat([latent[row], rotated[row]])
    assert same(all_rows(cache, 1), expected)
    assert same(all_rows(cache, 0), before[0])
    assert same(all_rows(cache, 2), before[2])


def test_store_reads_strided_parts_of_one_projection(impl: str, kind: str) -> None:
    cache = make(impl, kind)
    fused = random_rows(4, C + R + 5)
    cache.store(0, fused[:, :C], fused[:, C : C + R], tensor([9, 1, 30, 4]))
    assert same(all_rows(cache, 0)[[9, 1, 30, 4]], fused[:, : C + R])
    wide = random_rows(2 * C, 3)
    cache.store(0, wide.t()[:, ::2], random_rows(3, R), tensor([0, 1, 2]))
    assert same(all_rows(cache, 0)[:3, :C], wide.t()[:, ::2])


def test_gather_gives_rows_and_zeros_for_no_slot(impl: str, kind: str) -> None:
    cache = make(impl, kind)  # all NaN: a zero that came from 0 * row would show
    rows = random_rows(3, A)
    cache.store(2, rows[:, :C], rows[:, C:], tensor([0, 11, 34]))
    got = cache.gather(2, tensor([34, -1, 0, 0, 11, -1]))
    expected = torch.stack([rows[2], rows[0] * 0, rows[0], rows[0], rows[1], rows[0] * 0])
    assert torch.equal(got, expected)
    assert got.is_contiguous()


@pytest.mark.parametrize("count", [0, 1, 33, 70])
def test_implementations_agree_bit_for_bit(kind: str, count: int) -> None:
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(count)
        caches = {name: make(name, kind, page_size=11, dtype=dtype) for name in IMPLS}
        order = torch.randperm(77, device=DEVICE)
        slots, targets = order[:count].clone(), order.flip(0)[:count].clone()
        slots[::5] = -1
        targets[1::7] = -1
        rows = random_rows(77, A, dtype)
        everything = torch.arange(77, device=DEVICE)
        for cache in caches.values():
            for i in range(L):
                cache.store(i, rows[:, :C] + i, rows[:, C:], everything)
            cache.store(1, rows[:count, :C], rows[:count, C:], slots)
            cache.move(slots, targets)
        for i in range(L):
            got = {name: cache.gather(i, everything) for name, cache in caches.items()}
            assert torch.equal(got["torch"], got["triton"])


def test_move_reads_everything_before_it_writes(impl: str, kind: str) -> None:
    """An accepted tree path: slots 0, 2, 3 become 0, 1, 2; then a cycle and a reversal."""
    cache = make(impl, kind)
    rows = [random_rows(cache.num_slots, A) for _ in range(L)]
    for i in range(L):
        cache.store(i, rows[i][:, :C], rows[i][:, C:], tensor(list(range(cache.num_slots))))
    for src, dst in (
        ([0, 2, 3], [0, 1, 2]),
        ([4, 5, 6], [5, 6, 4]),
        (list(range(35)), list(range(34, -1, -1))),
        ([8, -1, 3, 1], [1, 2, -1, 8]),
        ([], []),
    ):
        cache.move(tensor(src), tensor(dst))
        pairs = [(s, d) for s, d in zip(src, dst, strict=True) if s >= 0 and d >= 0]
        for i in range(L):
            old = rows[i].clone()
            for s, d in pairs:
                rows[i][d] = old[s]
            assert same(all_rows(cache, i), rows[i])


def test_move_in_rounds_gives_the_same(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Less staging than all layers need: several rounds over fewer layers."""
    from specmla.kernels import move

    monkeypatch.setattr(move, "STAGING_BYTES", 3 * A * 4)  # one layer's rows
    test_move_reads_everything_before_it_writes("triton", kind)


def test_copy_pages_copies_every_layer(impl: str, kind: str) -> None:
    cache = make(impl, kind)
    rows = [random_rows(cache.num_slots, A) for _ in range(L)]
    for i in range(L):
        cache.store(i, rows[i][:, :C], rows[i][:, C:], tensor(list(range(cache.num_slots))))
    cache.copy_pages([(0, 6), (0, 2), (5, 1)])
    cache.copy_pages([])
    for i in range(L):
        pages = rows[i].view(N, G, A).clone()
        pages[6], pages[2], pages[1] = pages[0].clone(), pages[0].clone(), pages[5].clone()
        assert same(all_rows(cache, i), pages.view(-1, A))


def test_gaps_between_pages_are_never_written(impl: str) -> None:
    whole = torch.full((L, N, G * A + 13), 7.0, device=DEVICE)
    views = [whole[i, :, : G * A].unflatten(1, (G, A)) for i in range(L)]
    cache = LatentCache.from_pool(views, impl)
    slots = tensor(list(range(cache.num_slots)))
    for i in range(L):
        cache.store(i, random_rows(35, C), random_rows(35, R), slots)
    cache.move(slots, slots.flip(0))
    cache.copy_pages([(1, 2), (3, 4)])
    assert bool((whole[:, :, G * A :] == 7.0).all())


def test_rows_that_require_grad_leave_no_graph(impl: str) -> None:
    cache = make(impl, "owned")
    latent = random_rows(2, C).requires_grad_()
    cache.store(0, latent, random_rows(2, R).requires_grad_(), tensor([1, 2]))
    assert not cache.layer(0).requires_grad
    assert not cache.gather(0, tensor([1])).requires_grad


def test_cache_made_in_inference_mode_can_be_written_outside(impl: str) -> None:
    with torch.inference_mode():
        cache = LatentCache(1, 2, 4, A, torch.float32, DEVICE, impl)
    cache.store(0, random_rows(1, C), random_rows(1, R), tensor([3]))
    cache.move(tensor([3]), tensor([0]))
    assert torch.equal(cache.gather(0, tensor([0])), cache.gather(0, tensor([3])))


def test_dummy_rows_leave_every_page_as_it_was(impl: str, kind: str) -> None:
    """BL-26: rows without a live request have slot -1, whatever pages their old tables named."""
    cache = make(impl, kind)
    for i in range(L):
        cache.store(i, random_rows(35, C), random_rows(35, R), tensor(list(range(35))))
    before = [all_rows(cache, i) for i in range(L)]
    dummy = tensor([-1] * 12)
    for _ in range(3):
        for i in range(L):
            cache.store(i, random_rows(12, C), random_rows(12, R), dummy)
        cache.move(dummy, tensor(list(range(12))))
        cache.move(tensor(list(range(12))), dummy)
    for i in range(L):
        assert torch.equal(all_rows(cache, i), before[i])
