"""What the Triton backends declare, and what they refuse before anything runs."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionBackend, Requirements
from specmla.backends.rows import RowsBackend
from specmla.backends.select import get_backend, select_backend
from specmla.backends.step_size import StepSize
from specmla.backends.triton import TritonBackend
from specmla.errors import ArgumentError, UnsupportedError
from specmla.kernels import prims
from specmla.kernels.launch import Device
from specmla.kernels.plan import StepShape
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport

BACKENDS = [TritonBackend, RowsBackend]


def need(**changes: Any) -> Requirements:
    usual: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_heads": 12,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 16,
    }
    return Requirements(**(usual | changes))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prims, "INTERPRETED", True)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("backend", BACKENDS)
def test_serves_float32_and_float16_under_the_interpreter(backend: type[AttentionBackend]) -> None:
    for dtype in (torch.float32, torch.float16):
        assert backend().problems(need(dtype=dtype)) == []


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_wrong_under_the_interpreter(backend: type[AttentionBackend]) -> None:
    assert "11584" in " ".join(backend().problems(need(dtype=torch.bfloat16)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cpu_without_the_interpreter_is_refused(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prims, "INTERPRETED", False)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        backend().check(need())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_triton_is_reported(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert backend().unavailable() == ["the package triton is not installed"]
    assert "not installed" in " ".join(backend().problems(need()))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_reasons_are_listed(backend: type[AttentionBackend]) -> None:
    found = backend().problems(
        need(kv_lora_rank=48, qk_rope_head_dim=24, page_size=24, dtype=torch.float64)
    )
    for word in ("kv_lora_rank is 48", "qk_rope_head_dim is 24", "page_size is 24", "float64"):
        assert any(word in text for text in found), (word, found)


def test_masks_and_query_lengths() -> None:
    packed, rows = TritonBackend.capabilities, RowsBackend.capabilities
    assert packed.query_len_support is QueryLenSupport.VARLEN
    assert packed.masks == frozenset(DraftMask)
    assert rows.query_len_support is QueryLenSupport.SINGLE_ONLY
    assert DraftMask.TREE not in rows.masks


@pytest.mark.parametrize("backend", BACKENDS)
def test_num_splits_below_one_is_refused(backend: type[AttentionBackend]) -> None:
    with pytest.raises(ArgumentError, match="num_splits is 0"):
        backend(num_splits=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_options_are_listed_at_once(backend: type[AttentionBackend]) -> None:
    with pytest.raises(ArgumentError) as caught:
        backend(num_splits=4, batch_invariant=True, piece_keys=0)  # type: ignore[call-arg]
    for text in ("num_splits is 4, accepted with batch_invariant is None", "piece_keys is 0"):
        assert text in str(caught.value)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariance_is_declared_and_checked(backend: type[AttentionBackend]) -> None:
    assert backend.capabilities.batch_invariant
    wanted = need(batch_invariant=True)
    assert backend().problems(wanted) == [
        "batch_invariant is needed, accepted is one built with batch_invariant=True"
    ]
    assert backend.make(batch_invariant=True).problems(wanted) == []
    assert backend.make(batch_invariant=True).problems(need()) == []


@pytest.mark.usefixtures("interpreted")
def test_select_builds_what_is_needed() -> None:
    chosen = select_backend(need(batch_invariant=True))
    assert chosen.batch_invariant
    assert isinstance(chosen, TritonBackend)
    assert select_backend(need(batch_invariant=True), "rows").batch_invariant
    assert not select_backend(need(), "triton").batch_invariant
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        select_backend(need(batch_invariant=True), "reference")
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        get_backend("reference", batch_invariant=True)
    assert get_backend("triton", batch_invariant=True).batch_invariant


def test_the_tile_follows_the_rows_of_a_request() -> None:
    size = StepSize(Device("sm_90", 132), torch.bfloat16, 8, 2, 4, 16, 512, 64, 8192)
    one = dataclasses.replace(size, num_rows=2, max_query_len=1)
    assert TritonBackend().step_form(size)[1].block_m == 64
    assert TritonBackend().step_form(one)[1].block_m == 16
    assert TritonBackend(batch_invariant=True).step_form(one)[1].block_m == 64
    assert RowsBackend().step_form(size)[1].block_m == 16
    assert RowsBackend().step_form(size)[0] == StepShape(8, 8, 16, 512, 2)
    assert TritonBackend().step_form(size)[0] == StepShape(8, 2, 16, 512, 2)
