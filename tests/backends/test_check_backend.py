"""`check_backend` passes right backends and catches broken ones, each by the case that shows it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.base import (
    AttentionBackend,
    AttentionOutput,
    Requirements,
)
from specmla.backends.hopper import HopperBackend
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import get_backend
from specmla.cache import cache_format
from specmla.errors import ArgumentError, UnsupportedError
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.query import QueryLenSupport
from specmla.testing import CheckReport, check_backend, far_pages
from specmla.testing.check_cases import derive_cases

HAS = ReferenceBackend.capabilities
FLOAT32 = [torch.float32]


def check(backend: AttentionBackend, only: str = "", **options: Any) -> CheckReport:
    return check_backend(backend, device="cpu", dtypes=FLOAT32, only=only, **options)


@pytest.mark.slow
def test_the_reference_passes() -> None:
    report = check(ReferenceBackend())
    report.raise_if_failed()
    assert len(report.passed) > 40
    assert len(set(report.passed)) == len(report.passed)


def test_the_reference_passes_in_the_dtypes_it_declares() -> None:
    report = check_backend(ReferenceBackend(), device="cpu", only="float16|bfloat16|^page")
    report.raise_if_failed()
    assert {"ragged-float16", "tree-windows-bfloat16", "page-48"} <= set(report.passed)


def declaring(**changes: Any) -> ReferenceBackend:
    backend = ReferenceBackend()
    backend.capabilities = dataclasses.replace(HAS, **changes)
    return backend


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"dtypes": (torch.float32,)},
            {"refuses-dtype-float64", "refuses-dtype-bfloat16", "refuses-dtype-float16"},
        ),
        ({"masks": frozenset({DraftMask.CAUSAL})}, {"refuses-mask-tree", "refuses-mask-full"}),
        (
            {"page_size_multiple": 64},
            {f"refuses-page_size-{n}" for n in (1, 8, 16, 24, 32, 48)},
        ),
        ({"ranks": (512,)}, {f"refuses-kv_lora_rank-{n}" for n in (48, 96, 128, 256, 576)}),
        ({"rope_dims": (64,)}, {f"refuses-qk_rope_head_dim-{n}" for n in (24, 8, 0)}),
        ({"query_len_support": QueryLenSupport.UNIFORM}, {"refuses-ragged"}),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_serving_what_is_not_declared_is_caught(changes: dict[str, Any], names: set[str]) -> None:
    report = check(declaring(**changes), only="^refuses")
    assert {f.name for f in report.failures} == names
    assert all("was served" in f.message for f in report.failures)
    assert "refuses-num_heads-0" in report.passed
    with pytest.raises(AssertionError) as raised:
        report.raise_if_failed()
    assert all(f"{name}: " in str(raised.value) for name in names)


class Mumbles(ReferenceBackend):
    """Refuses without saying what it got or would accept."""

    def problems(self, need: Requirements) -> list[str]:
        found = super().problems(need)
        return ["this can't be served"] if found else []


class Crashes(ReferenceBackend):
    """Fails where it should refuse."""

    def forward_mqa(self, *tensors: Any, **options: Any) -> AttentionOutput:
        if tensors[0].dtype is torch.float8_e4m3fn:
            raise IndexError("oops")
        return super().forward_mqa(*tensors, **options)


class RefusesWhatItDeclares(ReferenceBackend):
    def forward_mqa(self, *tensors: Any, **options: Any) -> AttentionOutput:
        raise ArgumentError("not today")


@pytest.mark.parametrize(
    ("backend", "only", "message"),
    [
        (Mumbles, "refuses-page_size-0", "no reason names 'page_size' and its value '0'"),
        (Crashes, "refuses-dtype-float8", "failed with IndexError .oops. instead of refusing"),
        (RefusesWhatItDeclares, "heads-3", "refused, though problems.. lists nothing.*not today"),
    ],
)
def test_refusals_are_held_to_their_form(
    backend: type[ReferenceBackend], only: str, message: str
) -> None:
    (failure,) = check(backend(), only=only).failures
    assert re.search(message, failure.message)


def test_uniform_backends_get_uniform_batches() -> None:
    class Uniform(ReferenceBackend):
        seen: list[set[int]] = []  # noqa: RUF012

        def plan(self, part: VerifyPart, **options: Any) -> VerifyPart:
            self.seen.append(set(part.query_lens))
            if len(set(part.query_lens)) > 1:
                raise ArgumentError("query_len must be one, accepted are uniform batches")
            return super().plan(part, **options)

    backend = Uniform()
    backend.capabilities = dataclasses.replace(HAS, query_len_support=QueryLenSupport.UNIFORM)
    report = check(backend, only="totals|rows|refuses-ragged|heads-12")
    report.raise_if_failed()
    assert {"rows-q16", "rows-q1", "heads-12-q7", "refuses-ragged"} <= set(report.passed)
    assert sum(len(lens) > 1 for lens in backend.seen) == 1  # the refusal


def test_a_device_without_room_skips_far_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_pages, "_free_bytes", lambda device: 3 * 2**30)
    (skip,) = check(ReferenceBackend(), only="^far-pages$|refuses-num_heads").skipped
    assert skip == ("far-pages", "a pool of 2^31 elements takes 8.0 GiB, 2.0 GiB can be had")


def test_a_machine_that_cannot_run_a_backend_is_told() -> None:
    with pytest.raises(UnsupportedError, match="device is 'cpu'"):
        check_backend(HopperBackend(), device="cpu")
    with pytest.raises(ArgumentError, match=r"dtypes has \['torch.int8'\]"):
        check_backend(ReferenceBackend(), device="cpu", dtypes=[torch.int8])


def test_a_dtype_that_the_machine_refuses_is_skipped_with_the_reason() -> None:
    class NoHalf(ReferenceBackend):
        def problems(self, need: Requirements) -> list[str]:
            found = super().problems(need)
            half = need.dtype is torch.float16
            return [*found, "dtype is torch.float16, accepted is float32 here"] if half else found

    dtypes = [torch.float32, torch.float16]
    report = check_backend(NoHalf(), device="cpu", dtypes=dtypes, only="^ragged|dtype-float16")
    assert [skip.name for skip in report.skipped] == ["ragged-float16"]
    assert "skipped ragged-float16: dtype is torch.float16" in str(report)
    assert report.passed == ["refuses-dtype-float16"]


def test_nothing_run_is_no_success() -> None:
    with pytest.raises(AssertionError, match="nothing was checked"):
        check(ReferenceBackend(), only="no such case").raise_if_failed()


def test_progress_is_reported_and_the_report_reads_well() -> None:
    lines: list[str] = []
    report = check(ReferenceBackend(), only="heads-3$|no-keys", report=lines.append)
    assert [line.split()[:2] for line in lines] == [["passed", "no-keys"], ["passed", "heads-3"]]
    assert str(report).startswith("reference on cpu: 2 cases run in ")


def test_the_thorough_form_names_each_case_once() -> None:
    cases = derive_cases(
        ReferenceBackend(), device=torch.device("cpu"), dtypes=HAS.dtypes, thorough=True
    )
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) > 400
    for name in ("alone-q16c8191", "tree-windows-page-48-bfloat16", "causal-heads-63-float16"):
        assert name in names


@pytest.mark.parametrize("name", ["triton", "rows"])
def test_the_triton_backends_pass_interpreted(name: str) -> None:
    pytest.importorskip("triton")
    from specmla.kernels import prims

    if not prims.INTERPRETED:
        pytest.skip("kernels are compiled here: tests/gpu checks them in full")
    only = "heads-3$|tail-q2s513|^no-|dims-16|^slice$|^refuses"
    report = check(get_backend(name), only=only)
    report.raise_if_failed()
    assert {"heads-3", "slice", "dims-16-128", "refuses-dtype-float64"} <= set(report.passed)


@pytest.mark.slow
def test_batch_invariant_kernels_pass_interpreted() -> None:
    """Whatever the CPU's products of matrices do with a row's place."""
    pytest.importorskip("triton")
    from specmla.kernels import prims

    if not prims.INTERPRETED:
        pytest.skip("kernels are compiled here: tests/gpu checks them in full")
    report = check(get_backend("triton", batch_invariant=True), only="^rows$")
    report.raise_if_failed()
    assert report.passed == ["rows"]


def made_for(name: str, backend: str = "reference") -> AttentionBackend:
    scale = {"k_scale": 2.0**-6} if name == "fp8" else {}
    made = cache_format(name, 512, 64, dtype=torch.float32, **scale)
    return get_backend(backend, cache_format=made)


FEW = "^(no-|tail-q4|heads-12$|far|refuses)"


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("fp8", FEW),
        ("fp8_ds_mla", "^(tail-q4|small-page|repeats-many|far|refuses)"),
        ("fp8_per_token_head", FEW),
        ("nvfp4_ds_mla", FEW),
    ],
)
def test_a_backend_of_quantised_rows_gets_those(name: str, only: str) -> None:
    report = check_backend(made_for(name), device="cpu", only=only)
    report.raise_if_failed()
    assert {"far-pages", "refuses-format-plain"} <= set(report.passed)
    assert len(report.passed) > 6


def test_quantised_rows_that_are_read_wrongly_are_caught() -> None:
    class Louder(ReferenceBackend):
        def _widen(self, cached: Tensor, dtype: torch.dtype) -> Tensor:
            return super()._widen(cached, dtype) * 1.001

    packed = made_for("fp8_ds_mla").cache_format
    report = check_backend(Louder(packed), device="cpu", only="^(tail-q2s|far)")
    assert [failure.name for failure in report.failures] == ["tail-q2s513", "far-pages"]


@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head"])
def test_triton_over_quantised_rows_passes_interpreted(name: str) -> None:
    pytest.importorskip("triton")
    from specmla.kernels import prims

    if not prims.INTERPRETED:
        pytest.skip("kernels are compiled here: tests/gpu checks them in full")
    report = check_backend(
        made_for(name, "triton"), device="cpu", only="heads-3$|tail-q2s513|^no-|^far|^refuses"
    )
    report.raise_if_failed()
    assert {"heads-3", "far-pages", "refuses-format-plain"} <= set(report.passed)
