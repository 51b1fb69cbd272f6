"""The providers of other projects' kernels, against stand-ins with the real schemas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from specmla.backends.base import AttentionOutput, Requirements
from specmla.bench.fa3 import FA3Provider
from specmla.bench.flashmla import FlashMLAProvider
from specmla.bench.peers import PeerFiles, PeerLibrary
from specmla.bench.provider import get_provider
from specmla.bench.verify import requirements
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.testing import VerifyCase, assert_matches_oracle, make_case

NEED = Requirements(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    num_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    page_size=64,
)


def provider_of(name: str, operators: Any) -> Any:
    provider = get_provider(name)
    space = f"specmla_fake_{name}"
    assert isinstance(provider, FlashMLAProvider | FA3Provider)
    provider.library = dataclasses.replace(provider.library, namespace=space)
    return provider


def case_of(batch: str, **options: Any) -> VerifyCase:
    # Their tables may not hold absurd ids, so what lies in page 0 must be finite as well.
    return make_case(
        batch, num_heads=3, kv_lora_rank=32, rope_dim=16, page_size=64, poison=7.0, **options
    )


@pytest.mark.parametrize("name", ["flashmla", "fa3"])
@pytest.mark.parametrize(
    "batch", ["1q1s70", "3q4s130", "3q2s64,1q2s200", "5q1-3s65", "1q3s3,1q1s9"]
)
@pytest.mark.parametrize("mask", [DraftMask.CAUSAL, DraftMask.FULL])
def test_gives_what_the_oracle_gives(
    name: str, batch: str, mask: DraftMask, peer_operators: None
) -> None:
    provider, case = provider_of(name, peer_operators), case_of(batch, mask=mask)
    plan = provider.plan(case)
    for _ in range(2):
        got = provider.result(provider.run(case, case.latent_cache, plan), plan)
        assert_matches_oracle(got, case, case.tables())
    provider.schedule(case, plan)


@pytest.mark.parametrize("name", ["flashmla", "fa3"])
def test_run_reads_the_cache_that_it_is_given(name: str, peer_operators: None) -> None:
    provider, case = provider_of(name, peer_operators), case_of("2q2s70")
    plan = provider.plan(case)
    doubled = provider.result(provider.run(case, case.latent_cache * 2, plan), plan)
    other = dataclasses.replace(case, latent_cache=case.latent_cache * 2)
    assert_matches_oracle(doubled, other, other.tables())


def test_flashmla_makes_its_schedule_once(peer_operators: None) -> None:
    provider, case = provider_of("flashmla", peer_operators), case_of("2q2s70")
    plan = provider.plan(case)
    assert plan.schedule is not None


def test_padding_is_noted(peer_operators: None) -> None:
    provider = provider_of("flashmla", peer_operators)
    assert provider.note(case_of("3q2s70")) is None
    note = provider.note(case_of("4q1-2s70"))
    assert note == "padded to 2 rows a request: 8 instead of 6"
    assert provider_of("fa3", peer_operators).note(case_of("4q1-2s70")) is None


@pytest.mark.parametrize("name", ["flashmla", "fa3"])
def test_an_lse_of_another_shape_is_nan_not_a_guess(name: str, peer_operators: None) -> None:
    provider, case = provider_of(name, peer_operators), case_of("2q2s70")
    plan = provider.plan(case)
    got = provider.run(case, case.latent_cache, plan)
    odd = AttentionOutput(got.out, got.lse.flatten())
    assert bool(provider.result(odd, plan).lse.isnan().all())


@pytest.mark.parametrize(
    ("name", "changes", "part"),
    [
        ("flashmla", {"page_size": 16}, "page_size is 16, accepted are [64]"),
        ("flashmla", {"masks": frozenset({DraftMask.TREE})}, "masks ['tree']"),
        ("flashmla", {"dtype": torch.float32}, "dtype is torch.float32"),
        ("flashmla", {"kv_lora_rank": 256}, "accepted are 512 and 64"),
        ("fa3", {"page_size": 24}, "accepted are multiples of 16"),
        ("fa3", {"masks": frozenset({DraftMask.TREE})}, "masks ['tree']"),
        ("fa3", {"qk_rope_head_dim": 32}, "accepted are 512 and 64"),
        ("fa3", {}, "device is 'cpu', accepted are ['cuda']"),
    ],
)
def test_refuses_with_reasons(name: str, changes: dict[str, Any], part: str) -> None:
    need = dataclasses.replace(NEED, query_len_support=QueryLenSupport.VARLEN, **changes)
    found = get_provider(name).problems(need)
    assert any(part in reason for reason in found), found


def test_fa3_serves_small_pages_and_ragged_rows() -> None:
    case = make_case("3q1-2s70", num_heads=2, page_size=16)
    found = get_provider("fa3").problems(requirements(case))
    assert not any("page_size" in reason or "query" in reason for reason in found)


@pytest.mark.parametrize("name", ["flashmla", "fa3"])
def test_missing_library_says_how_to_give_it(name: str) -> None:
    (reason,) = get_provider(name).missing()
    assert f"--{name} FILE" in reason


def test_file_that_is_not_there_and_file_that_is_no_library(tmp_path: Path) -> None:
    absent = get_provider("fa3", PeerFiles(fa3=tmp_path / "no.so"))
    assert absent.missing() == [f"--fa3 is {tmp_path / 'no.so'}, accepted is an existing file"]
    file = tmp_path / "bad.so"
    file.write_text("no library")
    (reason,) = get_provider("flashmla", PeerFiles(flashmla=file)).missing()
    assert reason.startswith("bad.so can't be loaded: ")


def test_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "peerpack"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    library = PeerLibrary("--x", "peerpack", "lib.so", "nowhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert library.missing() == ["not given (--x FILE) and no installed peerpack has it"]
    (package / "lib.so").write_text("no library")
    (reason,) = library.missing()
    assert reason.startswith("lib.so can't be loaded: ")
