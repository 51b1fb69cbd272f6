"""The reference backend over quantised caches: float64 attention over what the bytes say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specmla.backends.base import Requirements
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import get_backend, select_backend
from specmla.cache import CacheFormat, cache_format
from specmla.cache.kernel_blocks import split_pages, split_table
from specmla.errors import ArgumentError, UnsupportedError
from specmla.mask import DraftMask
from specmla.reference import absorbed_mqa
from specmla.testing import make_case
from specmla.testing.case import VerifyCase
from specmla.testing.oracle import Oracle, assert_matches_oracle
from specmla.testing.poison import PoisonedMemory

C, R = 128, 32
FORMATS = ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla", "nvfp4-scaled"]


def made(name: str, dtype: torch.dtype = torch.float32, rope: int = R) -> CacheFormat:
    scale = 3 * 2.0**-8 if name.endswith("-scaled") else 1.0
    kind = {"fp8-scaled": "fp8", "nvfp4-scaled": "nvfp4_ds_mla"}.get(name, name)
    return cache_format(kind, C, rope, dtype=dtype, k_scale=scale)


def case_of(name: str, batch: Any, **options: Any) -> VerifyCase:
    dtype, rope = options.get("dtype", torch.float32), options.pop("rope_dim", R)
    usual = {"kv_lora_rank": C, "rope_dim": rope, "page_size": 16, "num_heads": 4}
    return make_case(batch, **(usual | options), cache_format=made(name, dtype, rope))


def check(case: VerifyCase) -> None:
    backend = ReferenceBackend(case.spec.cache_format)
    with PoisonedMemory():
        got = case.attend(backend)
    assert_matches_oracle(got, case, case.tables())


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 12, 20])
def test_against_the_dequantised_cache(name: str, dtype: torch.dtype, heads: int) -> None:
    check(case_of(name, [(4, 40), (1, 17), (0, 0), (3, 3), (2, 64)], dtype=dtype, num_heads=heads))


@pytest.mark.parametrize("mask", list(DraftMask), ids=lambda mask: mask.value)
@pytest.mark.parametrize("windows", [False, True])
def test_masks_and_windows(name: str, mask: DraftMask, windows: bool) -> None:
    batch = [(5, 33), (1, 1), (0, 0), (8, 50), (0, 12)]
    check(case_of(name, batch, mask=mask, windows=windows, seed=3))


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("layout", ["heads_first", "slice"])
def test_pages_gaps_and_strides(name: str, page_size: int, layout: str) -> None:
    options = {"page_size": page_size, "query_layout": layout, "page_gap": 8, "spare_pages": 9}
    check(case_of(name, [(3, 70), (1, 5)], **options))


@pytest.mark.parametrize("batch", [[(0, 0)], [(0, 0), (0, 9)], [(4, 2), (3, 5)]])
def test_rows_without_keys(name: str, batch: list[tuple[int, int]]) -> None:
    check(case_of(name, batch))


def test_no_rope(name: str) -> None:
    check(case_of(name, [(3, 30), (1, 8)], rope_dim=0))


def test_deepseek_dims(name: str) -> None:
    kind = made(name)
    wide = dataclasses.replace(kind, kv_lora_rank=512, qk_rope_head_dim=64)
    check(make_case([(4, 130), (2, 65)], num_heads=16, cache_format=wide))


def test_bytes_that_nobody_owns_change_no_bit(name: str) -> None:
    """Unused rows, unused pages and gaps: any bytes at all."""
    case = case_of(name, [(3, 21), (1, 30), (0, 0)], page_gap=4)
    backend = ReferenceBackend(case.spec.cache_format)
    expected = case.attend(backend)
    pool = torch.randint(0, 256, (case.latent_cache.untyped_storage().nbytes(),))
    other = pool.to(torch.uint8).as_strided(case.latent_cache.shape, case.latent_cache.stride())
    page = case.spec.page_size
    for i in range(len(case.requests)):
        for slot in case.slots(i).tolist():
            other[slot // page, slot % page] = case.latent_cache[slot // page, slot % page]
    got = dataclasses.replace(case, latent_cache=other).attend(backend)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def test_pages_of_128_as_blocks_of_64(name: str) -> None:
    case = case_of(name, [(4, 300), (1, 128), (2, 129)], page_size=128)
    backend, part = ReferenceBackend(case.spec.cache_format), case.tables()
    split = dataclasses.replace(
        part,
        page_size=64,
        block_table=split_table(part.block_table, 128, 64),
        num_pages=part.num_pages * 2,
    )
    blocks = dataclasses.replace(case, latent_cache=split_pages(case.latent_cache, 64))
    got, expected = blocks.attend(backend, split), case.attend(backend)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_one_scale_for_scores_and_values(scale: float) -> None:
    """BL-45: equal to attention over round(x / s) * s, with s read and written alike."""
    format = cache_format("fp8", C, R, dtype=torch.float32, k_scale=scale, v_scale=scale)
    case = make_case([(2, 20)], kv_lora_rank=C, rope_dim=R, page_size=16, cache_format=format)
    plain = make_case([(2, 20)], kv_lora_rank=C, rope_dim=R, page_size=16)
    by_hand = (plain.latent_cache.double() / scale).to(torch.float8_e4m3fn).double() * scale
    held = ~plain.latent_cache.isnan()
    assert torch.equal(case.rows()[held], by_hand[held])
    check(case)


def row_errors_allowed(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Norm [S] that a row [S, A] may be off by, from the mantissas alone (see `cache.formats`)."""
    size, kind = rows.abs(), made(name)
    scale = getattr(kind, "k_scale", 1.0)
    latent, rope = size[:, :C], size[:, C:]
    if kind.name == "nvfp4_ds_mla":  # 2 significant bits; scales of 4 bits, rounded up
        groups = latent.unflatten(1, (-1, 16))
        group_scale = (groups.amax(-1, keepdim=True) / 6 * 1.125).clamp(min=scale * 2.0**-6)
        latent = torch.maximum(groups, group_scale).flatten(1) / 4
        rope = (rope * 2.0**-4).clamp(min=scale * 2.0**-10)
    else:  # 4 significant bits, or half a subnormal step of a scale of at most max / 448
        step = max(scale if kind.name == "fp8" else 0.0, float(size.max()) / 448) * 2.0**-10
        latent, rope = (latent * 2.0**-4).clamp(min=step), (rope * 2.0**-4).clamp(min=step)
    return torch.cat([latent, rope], 1).norm(dim=1) * (1 + 2.0**-15)


def test_quantisation_moves_the_output_no_further_than_its_mantissa_allows(name: str) -> None:
    """With keys off by d_s, scores are off by at most b = scale * |q| * max d, so weights by a
    factor within exp(+-2b), and outputs by max d + (exp(2b) - 1) * max |v|.
    """
    case = case_of(name, [(4, 60)], dtype=torch.float64, softmax_scale=(C + R) ** -0.5 / 4)
    values = make_case(
        [(4, 60)], kv_lora_rank=C, rope_dim=R, page_size=16, num_heads=4, dtype=torch.float64
    ).latent_cache
    got = case.attend(ReferenceBackend(case.spec.cache_format))
    exact = absorbed_mqa(
        case.q_latent, case.q_rope, values, case.tables(), softmax_scale=case.softmax_scale
    )
    assert not torch.equal(got.out, exact.out)
    slots = case.slots(0)
    held = values.flatten(0, 1)[slots]
    allowed = row_errors_allowed(name, held)
    actual = (case.rows().flatten(0, 1)[slots] - held).norm(dim=1)
    assert (actual <= allowed).all()
    norms = torch.cat([case.q_latent, case.q_rope], -1).norm(dim=-1)
    bound = case.softmax_scale * norms * allowed.max()
    limit = allowed.max() + torch.expm1(2 * bound) * held[:, :C].norm(dim=1).max()
    assert ((got.out - exact.out).norm(dim=-1) <= limit).all()
    assert ((got.lse - exact.lse).abs() <= bound + 1e-6).all()  # 1e-6: LSE is float32


def test_a_wrong_scale_is_seen(name: str) -> None:
    """The oracle would notice a scale that is off by one part in a hundred."""
    case = case_of(name, [(2, 30)])
    got = case.attend(ReferenceBackend(case.spec.cache_format))
    oracle = Oracle.of(case, case.tables())
    oracle.check(got)
    with pytest.raises(AssertionError):
        oracle.check(got._replace(out=got.out * 1.01))


def need(format: CacheFormat | None, **changes: Any) -> Requirements:
    usual = {"device": torch.device("cpu"), "dtype": torch.float32, "num_heads": 4}
    usual |= {"kv_lora_rank": C, "qk_rope_head_dim": R, "page_size": 16}
    return Requirements(**(usual | changes), format=format)


def test_selection_builds_the_backend_for_the_format(name: str) -> None:
    format = made(name)
    backend = select_backend(need(format))
    assert (backend.capabilities.name, backend.cache_format) == ("reference", format)
    assert get_backend("reference", cache_format=format).cache_format == format
    plain = cache_format("fp32", C, R)
    assert select_backend(need(plain), "reference").cache_format is None


def test_what_is_not_served_is_refused_with_all_reasons(name: str) -> None:
    format = made(name)
    with pytest.raises(UnsupportedError, match=f"format is '{format.name}', accepted are") as error:
        select_backend(need(format, num_heads=0), "rows")
    assert "num_heads is 0" in str(error.value)
    with pytest.raises(UnsupportedError, match="format is"):
        get_backend("rows", cache_format=format)
    built = ReferenceBackend(format)
    with pytest.raises(UnsupportedError, match="format is plain, accepted by this one is"):
        built.check(need(None))
    with pytest.raises(UnsupportedError, match="build it with cache_format"):
        ReferenceBackend().check(need(format))
    with pytest.raises(UnsupportedError, match=r"format is for \(C, R, dtype\) = \(128, 32"):
        ReferenceBackend(format).check(need(format, kv_lora_rank=64))


def test_another_cache_is_refused(name: str) -> None:
    case = case_of(name, [(2, 20)])
    plain = make_case([(2, 20)], kv_lora_rank=C, rope_dim=R, page_size=16, num_heads=4)
    backend = ReferenceBackend(case.spec.cache_format)
    with pytest.raises(ArgumentError, match=r"torch.float32 on cpu, accepted is torch.uint8"):
        dataclasses.replace(case, latent_cache=plain.latent_cache).attend(backend)
    with pytest.raises(ArgumentError, match="accepted is one dtype"):
        case.attend(ReferenceBackend())
    with pytest.raises(ArgumentError, match=r"bytes=\d+"):
        dataclasses.replace(case, latent_cache=case.latent_cache[..., 1:]).attend(backend)
    short = dataclasses.replace(case, q_rope=case.q_rope[..., 1:])
    with pytest.raises(ArgumentError, match=r"\(C, R\) = \(128, 31\)"):
        short.attend(backend)
