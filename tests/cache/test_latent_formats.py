"""LatentCache over bytes: store, gather, move and copy in every quantised format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specmla.cache import CacheFormat, CacheLayout, LatentCache, cache_format
from specmla.cache.operations import KERNEL_FORMATS
from specmla.errors import ArgumentError

L, N, G, C, R = 2, 7, 5, 128, 16
A = C + R
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"]
FORMATS += ["nvfp4_ds_mla-scaled"]
CASES = [("torch", name) for name in FORMATS]
CASES += [("triton", name) for name in FORMATS if name.split("-")[0] in KERNEL_FORMATS]
KINDS = ["owned", "interleaved", "gaps"]


def made(name: str, dtype: torch.dtype = torch.float32) -> CacheFormat:
    scale = 0.5 if name.endswith("-scaled") else 1.0
    return cache_format(name.split("-")[0], C, R, dtype=dtype, k_scale=scale)


def make(impl: str, kind: str, format: CacheFormat) -> LatentCache:
    """A cache of bytes 0xff: NaN as a code and as a scale."""
    size = format.bytes_per_row
    if kind == "owned":
        cache = LatentCache(L, N, G, A, format.dtype, DEVICE, impl, format)
    elif kind == "interleaved":
        pool = torch.empty(N, L, G, size, dtype=torch.uint8, device=DEVICE)
        cache = LatentCache.from_pool([pool[:, i] for i in range(L)], impl, format)
    else:
        whole = torch.empty(L, N, G * size + 12, dtype=torch.uint8, device=DEVICE)
        views = [whole[i, :, : G * size].unflatten(1, (G, size)) for i in range(L)]
        cache = LatentCache.from_pool(views, impl, format)
    for i in range(L):
        cache.layer(i).fill_(0xFF)
    return cache


def slots_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def numbers(count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(count, width, device=DEVICE) * 3).to(dtype)


def all_bytes(cache: LatentCache, layer: int) -> Tensor:
    return cache.layer(layer).clone().reshape(cache.num_slots, -1)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_store_writes_the_bytes_of_the_named_rows_alone(case: tuple[str, str], kind: str) -> None:
    format = made(case[1])
    cache = make(case[0], kind, format)
    latent, rope = numbers(5, C), numbers(5, R)
    slots = [34, -1, 0, 3, 12]
    expected = [all_bytes(cache, i) for i in range(L)]
    cache.store(1, latent, rope, slots_of(slots))
    packed = format.quantise(latent, rope)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[1][slot] = packed[row]
    for i in range(L):
        assert torch.equal(all_bytes(cache, i), expected[i])


@pytest.mark.parametrize("kind", KINDS)
def test_gather_gives_the_dequantised_rows_and_zeros(case: tuple[str, str], kind: str) -> None:
    format = made(case[1])
    cache = make(case[0], kind, format)
    latent, rope = numbers(3, C), numbers(3, R)
    cache.store(0, latent, rope, slots_of([0, 11, 34]))
    rows = format.dequantise(format.quantise(latent, rope))
    wanted = slots_of([34, -1, 0, 11, 34])
    expected = torch.stack([rows[2], rows[0] * 0, rows[0], rows[1], rows[2]])
    assert torch.equal(cache.gather(0, wanted), expected)
    out = torch.full((5, A), float("nan"), device=DEVICE)
    assert cache.gather(0, wanted, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gathered_row_is_stored_as_the_same_bytes(
    case: tuple[str, str], dtype: torch.dtype
) -> None:
    if case[0] == "triton" and dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter truncates float32 to bfloat16 instead of rounding")
    format = made(case[1], dtype)
    cache = make(case[0], "owned", format)
    everything = slots_of(list(range(N * G)))
    fused = numbers(N * G, A + 3, dtype)  # strided parts of one projection
    cache.store(0, fused[:, :C], fused[:, C:A], everything)
    rows = cache.gather(0, everything)
    assert rows.dtype is dtype
    cache.store(1, rows[:, :C], rows[:, C:], everything)
    assert torch.equal(all_bytes(cache, 0), all_bytes(cache, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", FORMATS)
def test_move_and_copy_keep_every_bit(impl: str, name: str, kind: str) -> None:
    """Any bytes, NaN codes and scales among them: rows are never looked into."""
    if impl == "triton" and name.split("-")[0] not in KERNEL_FORMATS:
        pytest.skip("the kernels do not serve this format, construction refuses it")
    torch.manual_seed(1)
    cache = make(impl, kind, made(name))
    for i in range(L):
        cache.layer(i).copy_(torch.randint(0, 256, cache.layer(i).shape, dtype=torch.uint8))
    rows = [all_bytes(cache, i) for i in range(L)]
    src, dst = [0, 2, 3, 8, -1, 30], [1, 0, 2, 9, 4, -1]
    cache.move(slots_of(src), slots_of(dst))
    cache.copy_pages([(2, 6), (3, 5)])
    for i in range(L):
        expected = rows[i].clone()
        for s, d in zip(src, dst, strict=True):
            if s >= 0 and d >= 0:
                expected[d] = rows[i][s]
        pages = expected.view(N, G, -1)
        pages[6], pages[5] = pages[2].clone(), pages[3].clone()
        assert torch.equal(all_bytes(cache, i), expected)


def test_gaps_between_pages_are_never_written(case: tuple[str, str]) -> None:
    format = made(case[1])
    cache = make(case[0], "gaps", format)
    size = G * format.bytes_per_row
    whole = cache.layer(0).as_strided((N, size + 12), (size + 12, 1))
    whole.fill_(7)
    slots = slots_of(list(range(N * G)))
    cache.store(0, numbers(N * G, C), numbers(N * G, R), slots)
    cache.move(slots, slots.flip(0))
    cache.copy_pages([(1, 2)])
    assert bool((whole[:, size:] == 7).all())


def test_facts_of_a_quantised_cache() -> None:
    format = made("fp8_ds_mla", torch.bfloat16)
    cache = LatentCache(L, N, G, A, torch.bfloat16, DEVICE, "torch", format)
    assert (cache.width, cache.dtype, cache.format) == (A, torch.bfloat16, format)
    assert cache.layer(0).shape == (N, G, format.bytes_per_row)
    assert cache.layout == CacheLayout(A, torch.bfloat16, G, format)
    plain = cache_format("fp32", C, R)
    cache = LatentCache(L, N, G, A, torch.float32, DEVICE, format=plain)
    assert cache.format is None
    assert cache.layer(0).dtype is torch.float32


def test_an_engine_may_call_its_bytes_e4m3() -> None:
    format = made("fp8")
    pool = torch.zeros(N, G, A, dtype=torch.uint8, device=DEVICE)
    cache = LatentCache.from_pool([pool.view(torch.float8_e4m3fn)], "torch", format)
    cache.store(0, torch.ones(1, C, device=DEVICE), torch.ones(1, R, device=DEVICE), slots_of([6]))
    assert bool((pool[1, 1] == 0x38).all())


def test_disagreements_are_all_named() -> None:
    format = made("fp8_ds_mla", torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"width is 5, .*dtype is torch.float32, accepted"):
        LatentCache(L, N, G, 5, torch.float32, DEVICE, "torch", format)
    with pytest.raises(ArgumentError, match=f"kv_latent is {R} wide, accepted is {C}"):
        LatentCache(L, N, G, A, torch.bfloat16, DEVICE, "torch", format).store(
            0, numbers(1, R).bfloat16(), numbers(1, C).bfloat16(), slots_of([0])
        )
    e5m2 = torch.zeros(N, G, 576, dtype=torch.uint8).view(torch.float8_e5m2)
    row_bytes = {528: "MXFP8", 288: "NVFP4", 100: "accepted are 656"}
    deepseek = cache_format("fp8_ds_mla", 512, 64)
    for size, reason in row_bytes.items():
        views = [torch.zeros(N, G, size, dtype=torch.uint8)]
        with pytest.raises(ArgumentError, match=f"rows have {size} bytes.*{reason}"):
            LatentCache.from_pool(views, "torch", deepseek)
    with pytest.raises(ArgumentError, match="float8_e5m2"):
        LatentCache.from_pool([e5m2], "torch", cache_format("fp8", 512, 64))
    with pytest.raises(ArgumentError, match="float8_e5m2"):
        LatentCache.from_pool([e5m2], "torch")
    odd = torch.zeros(N * G * 656 + 1, dtype=torch.uint8)[1:].view(N, G, 656)
    with pytest.raises(ArgumentError, match="no multiples of 4 bytes"):
        LatentCache.from_pool([odd], "torch", deepseek)


def test_kernels_refuse_what_they_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmla.kernels.store.runs_on", lambda device: device.type == "cuda")
    monkeypatch.setattr("specmla.cache.pool.KERNEL_FORMATS", ("fp8",))
    with pytest.raises(ArgumentError, match=r"'triton' on cpu.*format is 'nvfp4_ds_mla', accepted"):
        LatentCache(L, N, G, A, torch.float32, "cpu", "triton", made("nvfp4_ds_mla"))
    with pytest.raises(ArgumentError, match=r"dtype is torch.float64, accepted by impl 'triton'"):
        LatentCache(L, N, G, A, torch.float64, "cpu", "triton", made("fp8", torch.float64))


def test_far_pages_are_reached_by_64_bit_addresses(case: tuple[str, str]) -> None:
    """Pages 2^31 bytes apart; nothing but their rows is touched, so nothing else is backed."""
    format = made(case[1])
    size, step = format.bytes_per_row, 2**31
    try:
        whole = torch.empty(2 * step + G * size, dtype=torch.uint8, device=DEVICE)
    except RuntimeError:
        pytest.skip("no room for 4 GiB of addresses")
    pages = whole.as_strided((3, G, size), (step, size, 1))
    cache = LatentCache.from_pool([pages], case[0], format)
    latent, rope, slots = numbers(3, C), numbers(3, R), slots_of([2 * G + 1, G + 3, 0])
    cache.store(0, latent, rope, slots)
    packed = format.quantise(latent, rope)
    assert torch.equal(pages[[2, 1, 0], [1, 3, 0]], packed)
    assert torch.equal(cache.gather(0, slots), format.dequantise(packed))
    cache.move(slots, slots_of([0, 2 * G + 4, G]))
    assert torch.equal(pages[[0, 2, 1], [0, 4, 0]], packed)
