"""`FixedHeads` over several backends: padded queries in, the real heads out, one call at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import select_backend
from specmla.backends.step_size import StepSize
from specmla.errors import ArgumentError, BusyError, UnsupportedError
from specmla.query import pad_heads
from specmla.testing import assert_matches_oracle, check_backend, make_case

FLOAT32 = [torch.float32]


def needing(**changes: Any) -> Requirements:
    usual: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_heads": 3,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "page_size": 16,
    }
    return Requirements(**(usual | changes))


def case_of(batch: str = "3q4s70,1q0s9", heads: int = 3, **options: Any) -> Any:
    return make_case(batch, num_heads=heads, kv_lora_rank=32, rope_dim=16, page_size=16, **options)


class Watched(ReferenceBackend):
    """Remembers the queries that it was given, and ruins the heads that should be dropped."""

    real = 3

    def forward_mqa(
        self, q_latent: Tensor, q_rope: Tensor, *rest: Any, **options: Any
    ) -> AttentionOutput:
        self.seen = (q_latent, q_rope)
        got = super().forward_mqa(q_latent, q_rope, *rest, **options)
        got.out[:, self.real :] = torch.nan
        got.lse[:, self.real :] = torch.nan
        return got


def test_the_backend_sees_the_fixed_heads_and_the_caller_its_own() -> None:
    inner, case = Watched(), case_of()
    got = case.attend(FixedHeads(inner, 8))
    assert got.out.shape == (12, 3, 32)
    assert got.lse.shape == (12, 3)
    assert_matches_oracle(got, case, case.tables())
    for given, query in zip(inner.seen, (case.q_latent, case.q_rope), strict=True):
        assert given.shape == (12, 8, query.shape[2])
        assert torch.equal(given[:, :3], query)
        assert given.stride() == (3 * query.shape[2], query.shape[2], 1)


@pytest.mark.slow
def test_check_backend_passes_over_the_reference() -> None:
    backend = FixedHeads(ReferenceBackend())
    only = "^(heads|no-|tail|refuses|tree|mask|slice|wide)"
    report = check_backend(backend, device="cpu", dtypes=FLOAT32, only=only)
    report.raise_if_failed()
    assert {"heads-1", "heads-128", "mask-full", "refuses-num_heads-0"} <= set(report.passed)
    assert not report.skipped


def test_check_backend_passes_over_the_reference_with_few_heads() -> None:
    only = "^(contexts|repeats|rows|no-|wide|page|tree|slice|refuses|heads)|strid"
    backend = FixedHeads(ReferenceBackend(), 17)
    report = check_backend(backend, device="cpu", dtypes=FLOAT32, only=only)
    report.raise_if_failed()
    assert {"heads-12", "rows", "no-keys", "repeats-many"} <= set(report.passed)
    assert any("num_heads is 20, accepted are 1 to 17" in skip.reason for skip in report.skipped)


# Surplus heads are NaN, and the interpreter's maximum over nothing else warns.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["triton", "rows"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
def test_check_backend_passes_over_triton_interpreted(name: str, invariant: bool) -> None:
    pytest.importorskip("triton")
    from specmla.backends.select import get_backend
    from specmla.kernels import prims

    if not prims.INTERPRETED:
        pytest.skip("kernels are compiled here: tests/gpu has the GPU's cases")
    backend = FixedHeads(get_backend(name, batch_invariant=invariant), 20)
    only = "heads-(3|12)$|tail-q2s513|^no-|^slice$|refuses-num_heads"
    report = check_backend(backend, device="cpu", dtypes=FLOAT32, only=only)
    report.raise_if_failed()
    assert {"heads-3", "heads-12", "tail-q2s513", "no-keys"} <= set(report.passed)


def test_the_workspace_grows_and_is_used_again() -> None:
    inner = Watched()
    backend = FixedHeads(inner, 8)
    small, large = case_of("1q1s5"), case_of("6q4s70")
    small.attend(backend)
    held = backend.workspace_bytes
    assert held == 4 * (1 * 3 + 5) * 48
    large.attend(backend)
    assert backend.workspace_bytes == 4 * (24 * 3 + 5) * 48
    at = [t.data_ptr() for t in inner.seen]
    assert_matches_oracle(small.attend(backend), small, small.tables())
    assert [t.data_ptr() for t in inner.seen] == at
    assert backend.workspace_bytes == 4 * (24 * 3 + 5) * 48


def test_results_outlive_later_calls() -> None:
    backend, first, second = FixedHeads(ReferenceBackend(), 8), case_of(), case_of("3q4s33")
    got = first.attend(backend)
    second.attend(backend)
    assert_matches_oracle(got, first, first.tables())


def test_growth_after_reserve_raises() -> None:
    backend = FixedHeads(ReferenceBackend(), 8)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    backend.reserve(8, kv_lora_rank=32, rope_dim=16, **options)
    assert backend.workspace_bytes == 4 * 8 * 8 * 48
    for heads in (1, 3, 8):
        case = case_of("2q4s70", heads)
        assert_matches_oracle(case.attend(backend), case, case.tables())
    assert backend.workspace_bytes == 4 * 8 * 8 * 48
    with pytest.raises(ArgumentError, match=r"q_latent takes .* accepted is what was reserved"):
        case_of("9q1s70", 8).attend(backend)
    with pytest.raises(ArgumentError, match="float64"):
        case_of(dtype=torch.float64).attend(backend)
    case = case_of("2q4s70")
    assert_matches_oracle(case.attend(backend), case, case.tables())


def test_a_workspace_of_inference_mode_serves_outside_of_it() -> None:
    backend, case = FixedHeads(ReferenceBackend(), 8), case_of()
    with torch.inference_mode():
        case.attend(backend)
    assert_matches_oracle(case.attend(backend), case, case.tables())
    larger = case_of("6q5s70")
    assert_matches_oracle(larger.attend(backend), larger, larger.tables())


class Nested(ReferenceBackend):
    """Calls its wrapper from within, as a second thread would."""

    outer: FixedHeads

    def forward_mqa(self, *tensors: Any, **options: Any) -> AttentionOutput:
        return self.outer.forward_mqa(*tensors, **options)


def test_re_entrance_raises_and_the_next_call_is_served() -> None:
    inner, case = Nested(), case_of()
    backend = inner.outer = FixedHeads(inner, 8)
    for _ in range(2):
        with pytest.raises(BusyError, match="in use by another call"):
            case.attend(backend)
    backend.backend = ReferenceBackend()
    assert_matches_oracle(case.attend(backend), case, case.tables())


class Waits(ReferenceBackend):
    """Stays in the call until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def forward_mqa(self, *tensors: Any, **options: Any) -> AttentionOutput:
        self.entered.set()
        assert self.go.wait(10)
        return super().forward_mqa(*tensors, **options)


def test_two_threads_at_once() -> None:
    inner, case, results = Waits(), case_of(), []
    backend = FixedHeads(inner, 8)
    thread = threading.Thread(target=lambda: results.append(case.attend(backend)))
    thread.start()
    assert inner.entered.wait(10)
    with pytest.raises(BusyError):
        case.attend(backend)
    with pytest.raises(BusyError):
        backend.reserve(1, kv_lora_rank=1, rope_dim=1, dtype=torch.float32, device="cpu")
    inner.go.set()
    thread.join(10)
    assert_matches_oracle(results[0], case, case.tables())


def test_too_many_heads_are_refused_everywhere() -> None:
    backend, case = FixedHeads(ReferenceBackend(), 2), case_of()
    reason = "num_heads is 3, accepted are 1 to 2"
    assert backend.problems(needing()) == [reason]
    assert backend.declared_problems(needing()) == [reason]
    with pytest.raises(ArgumentError, match=reason):
        case.attend(backend)
    part = case.planned(ReferenceBackend())
    with pytest.raises(ArgumentError, match=reason):
        backend.forward_mqa(case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=1.0)
    with pytest.raises(ArgumentError, match="num_heads is 0, accepted are integers >= 1"):
        FixedHeads(ReferenceBackend(), 0)


def test_queries_of_different_heads_are_refused() -> None:
    backend, case = FixedHeads(ReferenceBackend(), 8), case_of()
    part = case.planned(backend)
    for latent, rope in (
        (case.q_latent, case.q_rope[:, :2]),
        (case.q_latent[:-1], case.q_rope),
        (case.q_latent.flatten(), case.q_rope),
    ):
        with pytest.raises(ArgumentError, match="accepted are"):
            backend.forward_mqa(latent, rope, case.latent_cache, part, softmax_scale=1.0)


def test_reasons_of_the_backend_come_first_and_it_can_be_selected() -> None:
    backend = FixedHeads(ReferenceBackend())
    with pytest.raises(UnsupportedError, match=r"int8.*num_heads is 200") as raised:
        select_backend(needing(dtype=torch.int8, num_heads=200), backend)
    assert raised.value.subject == "backend 'reference-128-heads'"


def test_scratch_is_that_of_the_fixed_heads() -> None:
    inner: AttentionBackend = ReferenceBackend()
    case = case_of()
    size = StepSize.of(case.planned(inner), 3, 32, torch.float32)
    wide = StepSize.of(case.planned(inner), 8, 32, torch.float32)
    assert FixedHeads(inner, 8).scratch(size) == inner.scratch(wide) != inner.scratch(size)


def test_prompts_keep_their_heads() -> None:
    class Prompts(ReferenceBackend):
        def forward_mha(self, query: Tensor, *rest: Any, **options: Any) -> AttentionOutput:
            return AttentionOutput(query, query)

    query = torch.zeros(2, 3, 4)
    got = FixedHeads(Prompts(), 8).forward_mha(query, query, query, None, softmax_scale=1.0)  # type: ignore[arg-type]
    assert got.out is query


def test_pad_heads_refuses_a_workspace_of_another_kind() -> None:
    with pytest.raises(ArgumentError, match=r"workspace is torch\.float64"):
        pad_heads(torch.zeros(2, 3, 4), 8, torch.empty(0, dtype=torch.float64))
