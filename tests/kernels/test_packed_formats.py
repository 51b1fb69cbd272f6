"""The packed kernel over e4m3 rows: float64 attention over what the bytes say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specmla.backends.base import Requirements
from specmla.backends.rows import RowsBackend
from specmla.backends.select import get_backend, select_backend
from specmla.backends.triton import TritonBackend
from specmla.cache import CacheFormat, cache_format
from specmla.errors import ArgumentError, UnsupportedError
from specmla.kernels.inputs import entry_problems
from specmla.kernels.launch import Device, launch_table
from specmla.mask import DraftMask
from specmla.testing import make_case
from specmla.testing.case import VerifyCase
from specmla.testing.oracle import assert_matches_oracle
from specmla.testing.poison import PoisonedMemory

C, R, G = 128, 16, 16
NAMES = ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head"]
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)


def made(
    name: str, dtype: torch.dtype = torch.float32, rope: int = R, rank: int = C
) -> CacheFormat:
    scale = 3 * 2.0**-8 if name.endswith("-scaled") else 1.0
    return cache_format(name.split("-")[0], rank, rope, dtype=dtype, k_scale=scale)


def case_of(device: torch.device, name: str, batch: Any, **options: Any) -> VerifyCase:
    dtype, rope = options.get("dtype", torch.float32), options.pop("rope_dim", R)
    usual = {"kv_lora_rank": C, "rope_dim": rope, "page_size": G, "num_heads": 4, "device": device}
    return make_case(batch, **(usual | options), cache_format=made(name, dtype, rope))


def check(case: VerifyCase, **options: Any) -> None:
    backend = TritonBackend(cache_format=case.spec.cache_format, **options)
    with PoisonedMemory():
        got = case.attend(backend)
    assert_matches_oracle(got, as_read(case), case.tables())


def as_read(case: VerifyCase) -> VerifyCase:
    """The case whose numbers the kernel multiplies.

    With a scale of all rows those of the bytes: it takes bare codes, which every dtype holds, and
    scales its results. With scales in the rows those that a gather gives, in the query's dtype.
    """
    if case.spec.cache_format.name == "fp8":
        return case
    spec = dataclasses.replace(case.spec, cache_format=None)
    return dataclasses.replace(case, spec=spec, latent_cache=case.rows(case.spec.dtype))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [12, 20])
def test_ragged_rows(device: torch.device, name: str, dtype: torch.dtype, heads: int) -> None:
    batch = [(4, 40), (1, 17), (0, 0), (3, 3), (2, 66), (0, 9)]
    check(case_of(device, name, batch, dtype=dtype, num_heads=heads))


@pytest.mark.parametrize("mask", list(DraftMask), ids=lambda mask: mask.value)
@pytest.mark.parametrize("windows", [False, True])
def test_masks_and_windows(device: torch.device, name: str, mask: DraftMask, windows: bool) -> None:
    batch = [(5, 33), (1, 1), (0, 0), (8, 50)]
    check(case_of(device, name, batch, mask=mask, windows=True, seed=3))


@pytest.mark.parametrize("layout", ["heads_first", "slice"])
def test_gaps_strides_and_pieces(device: torch.device, name: str, layout: str) -> None:
    options = {"query_layout": layout, "page_gap": 12, "spare_pages": 9, "page_size": 32}
    check(case_of(device, name, [(3, 130), (1, 5)], **options), num_splits=3)


def test_a_decode(device: torch.device, name: str) -> None:
    check(case_of(device, name, [(1, s) for s in (1, 16, 33, 0, 100)], num_heads=16))


def test_no_rope(device: torch.device, name: str) -> None:
    check(case_of(device, name, [(3, 30), (1, 8)], rope_dim=0))


def test_rows_without_keys(device: torch.device, name: str) -> None:
    check(case_of(device, name, [(4, 2), (3, 5), (0, 0)]))


def test_deepseek_dims(device: torch.device, name: str) -> None:
    format = made(name, rope=64, rank=512)
    check(make_case([(4, 70), (2, 65)], num_heads=16, device=device, cache_format=format))


def test_batch_invariant_rows(device: torch.device, name: str) -> None:
    """Each request alone gives the bits that it gives in company."""
    case = case_of(device, name, [(3, 70), (1, 20), (2, 40)], page_size=32)
    backend = TritonBackend(
        batch_invariant=True, piece_keys=64, cache_format=case.spec.cache_format
    )
    together, at = case.attend(backend), 0
    for request in case.requests:
        rows = slice(at, at + request.query_len)
        alone = dataclasses.replace(
            case,
            q_latent=case.q_latent[rows],
            q_rope=case.q_rope[rows],
            requests=(request,),
        ).attend(backend)
        assert torch.equal(alone.out, together.out[rows])
        assert torch.equal(alone.lse, together.lse[rows])
        at = rows.stop


def need(device: torch.device, format: CacheFormat | None, **changes: Any) -> Requirements:
    usual = {"device": device, "dtype": torch.float32, "num_heads": 4}
    usual |= {"kv_lora_rank": C, "qk_rope_head_dim": R, "page_size": 16}
    return Requirements(**(usual | changes), format=format)


def test_selection(device: torch.device, name: str) -> None:
    format = made(name)
    elsewhere = TritonBackend(cache_format=format).problems(need(torch.device("meta"), format))
    assert [text for text in elsewhere if "device is 'meta'" in text]
    backend = select_backend(need(device, format), "triton")
    assert (type(backend), backend.cache_format) == (TritonBackend, format)
    backend = get_backend("triton", batch_invariant=True, cache_format=format)
    assert (backend.batch_invariant, backend.cache_format) == (True, format)


@pytest.mark.parametrize("arch", sorted(launch_table()))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_architecture_without_entries_is_refused_at_selection(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, arch: str, itemsize: int
) -> None:
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    found = entry_problems("packed_fp8", arch, itemsize)
    assert bool(found) == (arch == "gfx942")
    monkeypatch.setattr("specmla.backends.triton.describe_device", lambda _: Device(arch, 100))
    format = made("fp8", dtype)
    problems = TritonBackend(cache_format=format).problems(need(device, format, dtype=dtype))
    assert [text for text in problems if "launch entry" in text] == found
    assert not [text for text in TritonBackend().problems(need(device, None)) if "entry" in text]


def test_refusals(device: torch.device, name: str) -> None:
    format = made(name)
    with pytest.raises(ArgumentError, match=f"format is '{format.name}'.*num_splits is 0"):
        RowsBackend(num_splits=0, cache_format=format)
    fp4 = cache_format("nvfp4_ds_mla", C, R, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="format is 'nvfp4_ds_mla', accepted are"):
        select_backend(need(device, fp4), "triton")
    case = case_of(device, name, [(2, 20)])
    floats = dataclasses.replace(case, latent_cache=case.rows(torch.float32)[..., :-1])
    built = TritonBackend(cache_format=format)
    with pytest.raises(ArgumentError, match=r"bytes=\d+.*accepted is torch.uint8"):
        floats.attend(built)
    with pytest.raises(ArgumentError, match=r"dtypes are"):
        case.attend(TritonBackend())
    if format.alignment > 1:
        whole = torch.zeros(case.latent_cache.numel() + 1, dtype=torch.uint8, device=device)
        odd = whole[1:].view(case.latent_cache.shape)
        with pytest.raises(ArgumentError, match="no multiples of 4 bytes"):
            dataclasses.replace(case, latent_cache=odd).attend(built)
