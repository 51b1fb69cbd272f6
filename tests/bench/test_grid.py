"""A point of the grid: checked on a sample, timed in turns, every failure a row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Requirements
from specmla.backends.reference import ReferenceBackend
from specmla.bench.ceilings import Ceilings, measure_ceilings
from specmla.bench.grid import measure_point
from specmla.bench.points import Point
from specmla.bench.provider import BackendProvider, Provider, get_provider
from specmla.bench.report import GridRow
from specmla.bench.sample import MOST_REQUESTS, sampled_oracle
from specmla.bench.workload import GridOptions, Workload, make_pool, make_workload
from specmla.errors import ArgumentError
from specmla.testing import VerifyCase

POINT = Point("3q2s40,1q4s100", 4, page_size=16)
OPTIONS = GridOptions(torch.float32, 32, 16, torch.device("cpu"))
CEILINGS = Ceilings(1e3, 1.0)


class Odd(BackendProvider):
    """The reference backend under another name, changed in one respect."""

    def __init__(self, name: str, spoil: Callable[[AttentionOutput], AttentionOutput]) -> None:
        super().__init__(ReferenceBackend())
        self.name, self.spoil, self.calls = name, spoil, 0

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: Any) -> AttentionOutput:
        self.calls += 1
        return self.spoil(super().run(case, latent_cache, plan))


class Absent(Odd):
    def missing(self) -> list[str]:
        return ["not installed"]


class Unfit(Odd):
    def problems(self, need: Requirements) -> list[str]:
        return ["heads", "masks"]


def fine(got: AttentionOutput) -> AttentionOutput:
    return got


def all_doubled(got: AttentionOutput) -> AttentionOutput:
    return AttentionOutput(got.out * 2, got.lse)


def lse_in_base_two(got: AttentionOutput) -> AttentionOutput:
    return AttentionOutput(got.out, got.lse * 1.4427)


def raises(got: AttentionOutput) -> AttentionOutput:
    raise RuntimeError("no kernel image\nlong trace")


def refuses(got: AttentionOutput) -> AttentionOutput:
    raise ArgumentError("q is 3, accepted is 1")


def measure(*providers: Provider, point: Point = POINT) -> list[GridRow]:
    pool = make_pool([point], OPTIONS)
    return measure_point(point, providers, pool, CEILINGS, OPTIONS)


def load_of(point: Point, options: GridOptions = OPTIONS) -> Workload:
    return make_workload(point, make_pool([point], options), options)


def test_rows_in_order_with_figures_or_reasons() -> None:
    wrong = Odd("wrong", all_doubled)
    providers = [
        Absent("absent", fine),
        Unfit("unfit", fine),
        wrong,
        Odd("raises", raises),
        Odd("refuses", refuses),
        Odd("good", fine),
        get_provider("reference"),
    ]
    rows = measure(*providers)
    assert [row.provider for row in rows] == [p.name for p in providers]
    statuses = ["absent", "refused", "wrong", "failed", "refused", "timed", "timed"]
    assert [row.status for row in rows] == statuses
    assert [row.reason for row in rows[:2]] == ["not installed", "heads; masks"]
    assert "exceeds the budget" in str(rows[2].reason)
    assert wrong.calls == 1
    assert rows[3].reason == "it can't be planned or run: RuntimeError: no kernel image"
    assert rows[4].reason == "q is 3, accepted is 1"
    assert all(row.us is None for row in rows[:5])
    for row in rows[5:]:
        assert row.us is not None
        assert row.us > 0
        assert row.plan_us is not None
        assert 0 < (row.rel_err or 0) < 1e-5
        assert row.checked_requests == 4
        assert row.gbps == pytest.approx((3 * 40 + 100) * 48 * 4 / row.us / 1e3)
    json.dumps([dataclasses.asdict(row) for row in rows])


@pytest.mark.parametrize("mask", ["causal", "full", "tree"])
def test_serves_every_mask(mask: str) -> None:
    (row,) = measure(get_provider("reference"), point=Point("2q5s40", 2, mask, 16))
    assert row.status == "timed"


def test_wrong_lse_is_wrong_for_ours_and_a_note_for_others() -> None:
    ours, theirs = Odd("ours", lse_in_base_two), Odd("theirs", lse_in_base_two)
    theirs.checks_lse = False
    first, second = measure(ours, theirs)
    assert first.status == "wrong"
    assert second.status == "timed"
    assert str(second.note).startswith("lse: ")


def test_wrong_output_is_wrong_for_others_too() -> None:
    theirs = Odd("theirs", all_doubled)
    theirs.checks_lse = False
    assert measure(theirs)[0].status == "wrong"


def test_a_row_outside_the_sample_must_be_finite_at_least() -> None:
    point = Point("20q1s40", 2, page_size=16)
    chosen = sampled_oracle(load_of(point).case).rows.tolist()
    outside = next(row for row in range(20) if row not in chosen)

    def spoil(got: AttentionOutput) -> AttentionOutput:
        out = got.out.clone()
        out[outside, 1, 3] = float("nan")
        return AttentionOutput(out, got.lse)

    (row,) = measure(Odd("nan", spoil), point=point)
    assert row.status == "wrong"
    assert "1 of 20 rows are not finite" in str(row.reason)


def test_sample_has_the_longest_and_a_few_others() -> None:
    case = load_of(Point("20q1-3s20,1q2s90,20q2s20", 2, page_size=16)).case
    sample = sampled_oracle(case)
    assert sample.requests == MOST_REQUESTS
    starts = [sum(r.query_len for r in case.requests[:i]) for i in range(len(case.requests))]
    assert starts[20] in sample.rows.tolist()
    rows = len(sample.rows)
    assert sample.oracle.exact.out.shape == (rows, 2, 32)
    got = AttentionOutput(
        torch.zeros(sum(r.query_len for r in case.requests), 2, 32), torch.ones(1)
    )
    got.out[sample.rows] = sample.oracle.exact.out.float()
    assert sample.relative_error(got) < 1e-6


def test_sample_of_a_costly_case_is_the_longest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmla.bench.sample.MOST_FLOPS", 1.0)
    sample = sampled_oracle(load_of(Point("5q1s20,1q3s90", 2, page_size=16)).case)
    assert sample.requests == 1
    assert sample.rows.tolist() == [5, 6, 7]


def test_windows_are_disjoint_and_guarded_by_nan() -> None:
    pool = make_pool([POINT], OPTIONS)
    pages = 3 * 3 + 7
    windows = pool.windows(16, pages, most=9)
    assert len(windows) == 2
    assert all(window.shape == (pages, 16, 48) for window in windows)
    assert all(bool(window.isfinite().all()) for window in windows)
    assert not torch.equal(*windows)
    base = windows[0].untyped_storage()
    everything = torch.empty(0).set_(base).view(-1, 48)
    assert bool(everything[:64].isnan().all())
    assert bool(everything[-64:].isnan().all())
    assert int(everything.isfinite().all(1).sum()) == len(everything) - 128


def test_pages_are_permuted_and_owned_once() -> None:
    case = load_of(POINT).case
    owned = [page for r in case.requests for page in r.block_ids]
    assert sorted(owned) == list(range(16))
    assert owned != sorted(owned)


def test_same_point_same_data_other_point_other_data() -> None:
    first, again, other = (
        load_of(POINT).case,
        load_of(POINT).case,
        load_of(Point("4q2s40", 4)).case,
    )
    assert torch.equal(first.q_latent, again.q_latent)
    assert first.requests == again.requests
    assert not torch.equal(first.q_latent[:4], other.q_latent[:4])


def test_ceilings_are_measured_and_bound_the_work() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert found["copy_gbps"] > 0
    assert found["gemm_tflops"] > 0
    assert Ceilings(2000.0, 500.0).floor_us(4_000_000, 10**9) == pytest.approx(2.0)
    assert Ceilings(2000.0, 500.0).floor_us(4_000, 10**9) == pytest.approx(2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
@pytest.mark.parametrize("name", ["triton", "rows"])
def test_kernels_under_the_interpreter(name: str) -> None:
    point = Point("1q2s20", 1, page_size=16)
    pool = make_pool([point], OPTIONS)
    (row,) = measure_point(point, [get_provider(name)], pool, CEILINGS, OPTIONS)
    assert row.status == "timed", row.reason


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["1q4s1k", "8q1-4s2k"])
def test_point_on_the_gpu(batch: str) -> None:
    device = torch.device("cuda")
    options = GridOptions(torch.bfloat16, 512, 64, device)
    point = Point(batch, 16)
    found = measure_ceilings(device, torch.bfloat16)
    ceilings = Ceilings(found["copy_gbps"], found["gemm_tflops"])
    providers = [get_provider(name) for name in ("triton", "rows")]
    rows = measure_point(point, providers, make_pool([point], options), ceilings, options)
    assert [row.status for row in rows] == ["timed", "timed"], rows
    for row in rows:
        assert row.us is not None
        assert row.us > ceilings.floor_us(int((row.gbps or 0) * row.us * 1e3), 0)
        assert (row.host_us or 0) > 0
