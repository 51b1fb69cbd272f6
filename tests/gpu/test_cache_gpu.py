"""The cache on a GPU: pools past 2^31 elements, bfloat16, no wait for the device, graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmla.cache import LatentCache
from specmla.cache.projected import store_projected
from specmla.config import MLAConfig
from specmla.rope import RotaryEmbedding
from specmla.testing import assert_within_budget

pytestmark = pytest.mark.gpu

C, R, G = 512, 64, 64
A = C + R
FAR, NEAR = (58_300, 116_600), (1, 2)  # past the wrap of signed and unsigned 32-bit addresses
NUM_PAGES = 116_700
KEYS = 65


def slots_of(pages: tuple[int, int], count: int = KEYS) -> Tensor:
    return torch.tensor([pages[i // G] * G + i % G for i in range(count)], device="cuda")


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)


@pytest.fixture(scope="module")
def big() -> LatentCache:
    """BL-03: 8.6 GB of bfloat16, every row zero but those under test."""
    free, _ = torch.cuda.mem_get_info()
    if free < 10 * 2**30:
        pytest.skip(f"needs 10 GiB of free GPU memory, there are {free / 2**30:.1f}")
    cache = LatentCache(1, NUM_PAGES, G, A, torch.bfloat16, "cuda")
    assert cache.impl == "triton"
    return cache


@pytest.fixture
def latents(big: LatentCache) -> Tensor:
    big.layer(0).zero_()
    torch.manual_seed(0)
    return torch.randn(KEYS, A, device="cuda").bfloat16()


def assert_only(cache: LatentCache, expected: dict[int, Tensor]) -> None:
    """Pages given hold exactly these rows, all others are zero (a wrapped address shows there)."""
    pool = cache.layer(0)
    for page, rows in expected.items():
        assert torch.equal(bits(pool[page, : len(rows)]), bits(rows))
        assert not pool[page, len(rows) :].any()
    counts = torch.zeros(NUM_PAGES, dtype=torch.bool, device="cuda")
    for start in range(0, NUM_PAGES, 10_000):
        counts[start : start + 10_000] = pool[start : start + 10_000].flatten(1).any(dim=1)
    assert set(counts.nonzero().flatten().tolist()) == {
        p for p, rows in expected.items() if len(rows)
    }


def test_store_far_pages(big: LatentCache, latents: Tensor) -> None:
    big.store(0, latents[:, :C], latents[:, C:], slots_of(FAR))
    assert_only(big, {FAR[0]: latents[:G], FAR[1]: latents[G:]})


def test_gather_far_pages(big: LatentCache, latents: Tensor) -> None:
    for pages in (FAR, NEAR):
        for i, page in enumerate(pages):
            part = latents[i * G : (i + 1) * G]
            big.layer(0)[page, : len(part)] = part
    far, near = big.gather(0, slots_of(FAR)), big.gather(0, slots_of(NEAR))
    assert torch.equal(bits(far), bits(latents))
    assert torch.equal(bits(far), bits(near))


def test_move_far_pages(big: LatentCache, latents: Tensor) -> None:
    big.store(0, latents[:, :C], latents[:, C:], slots_of(NEAR))
    big.move(slots_of(NEAR), slots_of(FAR))
    both = {NEAR[0]: latents[:G], NEAR[1]: latents[G:], FAR[0]: latents[:G], FAR[1]: latents[G:]}
    assert_only(big, both)
    big.layer(0)[list(NEAR)] = 0
    big.move(slots_of(FAR), slots_of(NEAR))
    assert_only(big, both)


def test_copy_far_pages(big: LatentCache, latents: Tensor) -> None:
    big.store(0, latents[:, :C], latents[:, C:], slots_of(NEAR))
    big.copy_pages(list(zip(NEAR, FAR, strict=True)))
    both = {NEAR[0]: latents[:G], NEAR[1]: latents[G:], FAR[0]: latents[:G], FAR[1]: latents[G:]}
    assert_only(big, both)
    big.layer(0)[list(NEAR)] = 0
    big.copy_pages(list(zip(FAR, NEAR, strict=True)))
    assert_only(big, both)


@pytest.mark.parametrize("page_size", [1, 48, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_kernels_equal_the_twins_on_the_device(dtype: torch.dtype, page_size: int) -> None:
    torch.manual_seed(page_size)
    caches = [LatentCache(5, 40, page_size, A, dtype, "cuda", impl) for impl in ("torch", "triton")]
    total = caches[0].num_slots
    rows = torch.randn(total, A, device="cuda").to(dtype)
    slots = torch.randperm(total, device="cuda")
    targets = torch.randperm(total, device="cuda")
    slots[::9] = -1
    targets[4::11] = -1
    for cache in caches:
        for i in range(5):
            cache.layer(i).fill_(float("nan"))
            cache.store(i, rows[:, :C] * (i + 1), rows[:, C:], slots)
        cache.move(slots, targets)
        cache.copy_pages([(0, 39), (0, 20), (7, 8)])
    everything = torch.cat([torch.arange(total, device="cuda"), torch.tensor([-1], device="cuda")])
    for i in range(5):
        twin, ours = (cache.gather(i, everything).nan_to_num(nan=777.0) for cache in caches)
        assert torch.equal(twin, ours)


def small() -> tuple[LatentCache, Tensor, Tensor]:
    cache = LatentCache(4, 16, G, A, torch.bfloat16, "cuda")
    for i in range(4):
        cache.layer(i).zero_()
    rows = torch.randn(96, A, device="cuda").bfloat16()
    return cache, rows, torch.arange(96, device="cuda") + 30


def test_nothing_waits_for_the_device() -> None:
    cache, rows, slots = small()
    calls: list[Callable[[], object]] = [
        lambda: cache.store(0, rows[:, :C], rows[:, C:], slots),
        lambda: cache.gather(0, slots),
        lambda: cache.move(slots, slots - 30),
        lambda: cache.copy_pages([(1, 9), (2, 10)]),
    ]
    for call in calls:
        call()  # compile first
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_operations_follow_the_slots_of_the_replay() -> None:
    """BL-18, BL-26: replays write where the slots say, dummy pages and -1 rows stay untouched."""
    cache, rows, _ = small()
    slots = torch.full((6,), -1, dtype=torch.int64, device="cuda")
    targets = slots.clone()
    out = torch.zeros(6, A, dtype=torch.bfloat16, device="cuda")
    new = rows[:6].clone()

    def step() -> None:
        for i in range(4):
            cache.store(i, new[:, :C], new[:, C:], slots)
        cache.move(slots, targets)
        out.copy_(cache.gather(3, targets))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert not any(cache.layer(i).any() for i in range(4))
    for first in (62, 7 * G + 62, 9 * G):
        for i in range(4):
            cache.layer(i).zero_()
        slots.copy_(torch.tensor([first, first + 1, first + 2, -1, first + 4, -1]))
        targets.copy_(torch.tensor([first + 1, first + 2, -1, 0, first, 1]))
        graph.replay()
        expected = torch.zeros(16 * G, A, dtype=torch.bfloat16, device="cuda")
        expected[[first + 2, first + 4]] = new[[2, 4]]
        expected[[first + 1, first + 2, first]] = new[[0, 1, 4]]
        for i in range(4):
            assert torch.equal(cache.layer(i).reshape(-1, A), expected)
        read = torch.where((targets >= 0)[:, None], expected[targets.clamp(min=0)], 0)
        assert torch.equal(out, read)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_projected_rows_are_as_good_as_those_of_three_steps(dtype: torch.dtype) -> None:
    """DeepSeek's dims; nothing waits, and a captured one follows rows and slots."""
    config = MLAConfig(
        hidden_size=64, num_heads=1, kv_lora_rank=C, qk_nope_head_dim=8, qk_rope_head_dim=R,
        v_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    count, eps = 300, 1e-6
    rows = torch.randn(count, A, device="cuda").to(dtype)
    weight = (1 + 0.3 * torch.randn(C, device="cuda")).to(dtype)
    angles = RotaryEmbedding(config).at(torch.arange(count, device="cuda") * 331, dtype)
    slots = torch.randperm(16 * G, device="cuda")[:count]
    slots[::7] = -1
    caches = [LatentCache(1, 16, G, A, dtype, "cuda", impl) for impl in ("torch", "triton")]
    for cache in caches:
        cache.layer(0).zero_()
        store_projected(cache, 0, rows, weight, angles, slots, eps=eps)
    kept, wide = slots[slots >= 0], rows.double()
    norm = wide[:, :C] / (wide[:, :C].square().mean(-1, keepdim=True) + eps).sqrt()
    key = wide[:, C:]
    turned = key * angles.cos.double() + key[:, angles.partner] * angles.sin.double()
    exact = torch.cat([weight.double() * norm, turned], dim=-1)[slots >= 0]
    plain, ours = (cache.gather(0, kept) for cache in caches)
    assert_within_budget(ours, exact, plain)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        store_projected(caches[1], 0, rows, weight, angles, slots, eps=eps)
    slots.copy_(slots.flip(0))
    caches[1].layer(0).zero_()
    graph.replay()
    eager = LatentCache(1, 16, G, A, dtype, "cuda")
    eager.layer(0).zero_()
    store_projected(eager, 0, rows, weight, angles, slots, eps=eps)
    assert torch.equal(caches[1].layer(0), eager.layer(0))
