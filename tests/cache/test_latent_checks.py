"""What LatentCache refuses, and facts it states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmla.cache import CacheLayout, LatentCache
from specmla.errors import ArgumentError
from specmla.kernels.gather import gather_rows
from specmla.kernels.move import LayerTable, move_rows
from specmla.kernels.store import store_rows

L, N, G, C, R = 3, 7, 5, 24, 8
A = C + R
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poisoned(impl: str) -> LatentCache:
    cache = LatentCache(L, N, G, A, torch.float32, DEVICE, impl)
    for i in range(L):
        cache.layer(i).fill_(float("nan"))
    return cache


def tensor(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def random_rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, device=DEVICE).to(dtype)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("bad", [35, 2**31, 2**40, -2])
@pytest.mark.skipif(DEVICE != "cpu", reason="device slots are not read by the host")
def test_slots_outside_are_refused_before_anything_is_written(impl: str, bad: int) -> None:
    cache = poisoned(impl)
    slots = tensor([1, bad])
    good = tensor([0, 2])
    for call in (
        lambda: cache.store(0, random_rows(2, C), random_rows(2, R), slots),
        lambda: cache.gather(0, slots),
        lambda: cache.move(slots, good),
        lambda: cache.move(good, slots),
    ):
        with pytest.raises(ArgumentError, match=rf"{bad}.*accepted are -1 \.\. 34"):
            call()
    assert all(bool(cache.layer(i).isnan().all()) for i in range(L))


def test_kernels_skip_slots_outside_the_pool() -> None:
    """On a GPU nobody has looked at the slots: outside is neither read nor written."""
    guarded = torch.full((N + 2, G, A), 7.0, device=DEVICE)
    pool = guarded[1:-1]
    slots = tensor([N * G, -1, 2, -G, N * G + G - 1])
    store_rows(pool, torch.ones(5, C, device=DEVICE), torch.ones(5, R, device=DEVICE), slots)
    table = LayerTable.of([pool])
    move_rows(table, slots, tensor([0, 1, 3, 4, 5]))
    move_rows(table, tensor([0, 1, 4, 5, 6]), slots)
    assert bool((guarded[0] == 7).all())
    assert bool((guarded[-1] == 7).all())
    got = gather_rows(pool, slots)
    assert bool((got[[0, 1, 3, 4]] == 0).all())


def test_every_problem_of_a_store_is_listed() -> None:
    cache = poisoned("torch")
    with pytest.raises(ArgumentError) as error:
        cache.store(0, random_rows(3, C).half(), random_rows(2, R), tensor([0, 1]).int())
    for part in (
        "slots is torch.int32",
        "kv_latent has shape (3, 24)",
        "kv_latent is torch.float16",
    ):
        assert part in str(error.value)
    with pytest.raises(ArgumentError, match="accepted is a sum of 32"):
        cache.store(0, random_rows(2, C), random_rows(2, R + 1), tensor([0, 1]))
    with pytest.raises(ArgumentError, match="accepted is one dimension"):
        cache.gather(0, tensor([0, 1])[None])
    with pytest.raises(ArgumentError, match="accepted are equal ones"):
        cache.move(tensor([0, 1]), tensor([0]))
    for layer in (-1, L):
        with pytest.raises(ArgumentError, match=rf"index is {layer}, accepted are 0 \.\. 2"):
            cache.gather(layer, tensor([0]))
    assert all(bool(cache.layer(i).isnan().all()) for i in range(L))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, N)], "must lie in"),
        ([(-1, 0)], "must lie in"),
        ([(0, 2), (1, 2)], "a destination twice"),
        ([(0, 2), (2, 3)], r"pages \[2\] are both"),
    ],
)
def test_copy_pages_refuses(pairs: list[tuple[int, int]], message: str) -> None:
    cache = poisoned("torch")
    with pytest.raises(ArgumentError, match=message):
        cache.copy_pages(pairs)


def test_construction_lists_every_problem() -> None:
    with pytest.raises(ArgumentError) as error:
        LatentCache(0, 0, 0, 0, torch.int8, "cpu", "cuda")  # type: ignore[arg-type]
    text = str(error.value)
    for name in (
        "num_layers is 0",
        "num_pages is 0",
        "page_size is 0",
        "width is 0",
        "impl is 'cuda'",
    ):
        assert name in text


def test_triton_on_the_cpu_is_refused_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specmla.kernels.store.runs_on", lambda device: device.type == "cuda")
    with pytest.raises(ArgumentError, match="impl is 'triton' on cpu"):
        LatentCache(1, 1, 1, A, torch.float32, "cpu", "triton")
    assert LatentCache(1, 1, 1, A, torch.float32, "cpu").impl == "torch"


def test_pool_views_that_disagree_are_refused() -> None:
    base = torch.zeros(L, N, G, A + 1)
    good = torch.zeros(N, G, A)
    memory = bytearray(8 * A + 2)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    odd = torch.frombuffer(memory, dtype=torch.float32, count=A, offset=4 * A + 2)
    for views, message in (
        ([], "views is empty"),
        ([good[0]], "accepted is"),
        ([base[0, ..., :A]], "without gaps"),
        ([good.transpose(1, 2)], "without gaps"),
        ([good[:1].expand(N, G, A)], "page stride of 0"),
        ([good, torch.zeros(N + 1, G, A)], "differ in shape"),
        ([good, good.double()], "differ in dtype"),
        ([good, torch.zeros(N, 2 * G, A)[:, :G]], "differ in strides"),
        ([good, good], "same address"),
        ([good.int()], "torch.int32"),
        ([raw[: 4 * A].view(torch.float32).view(1, 1, A), odd.view(1, 1, A)], "whole number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LatentCache.from_pool(views)


def test_facts_of_a_cache() -> None:
    pool = torch.empty(N, L, G, A, device=DEVICE)
    cache = LatentCache.from_pool([pool[:, i] for i in range(L)])
    assert (cache.num_layers, cache.num_pages, cache.page_size, cache.width) == (L, N, G, A)
    assert cache.num_slots == N * G
    assert cache.layout.bytes_per_row == A * 4
    assert cache.layer(1).shape == (N, G, A)
    assert cache.layer(1).stride() == (L * G * A, A, 1)
    assert cache.impl == ("triton" if DEVICE == "cuda" else "torch")
    assert cache.layout == CacheLayout(A, torch.float32, G)
