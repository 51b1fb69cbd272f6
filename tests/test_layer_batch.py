"""Mixed batches through the whole layer: every request as if it were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmla.backends.reference import ReferenceBackend
from specmla.backends.with_prompts import WithPrompts
from specmla.cache import cache_format
from tests.mixed_batch import (
    EXTEND,
    MIXED,
    PROMPT,
    VERIFY,
    Absorbing,
    Batch,
    Part,
    check_errors,
    make_layer,
)

EXACT = {"rtol": 0.0, "atol": 1e-11}
# Outputs are of size 1; LSEs below 16 are rounded to float32 in each of up to 40 merges.
MERGED = {"rtol": 0.0, "atol": 40 * 2 * 16 * 2.0**-24}


def test_long_extends_and_prompts_take_the_other_path() -> None:
    batch = Batch(MIXED, 16)
    step = batch.builder.build(batch.requests)
    assert step.order == (2, 3, 4, 7, 9, 1, 6, 0, 5, 8)
    assert step.verify.query_lens == (5, 1, 0, 0, 4, 3)
    assert step.prefill.query_lens == (30, 9, 20, 1)
    step = Batch(MIXED, 16, backend=ReferenceBackend()).builder.build(batch.requests)
    assert step.verify.query_lens == (5, 1, 0, 0, 4, 3, 30)


def check(batch: Batch) -> None:
    everyone = range(len(batch.requests))
    within = EXACT if batch.builder.rules.workspace is None else MERGED
    for i, got in zip(everyone, batch.run(everyone), strict=True):
        alone = batch.run([i])[0]
        torch.testing.assert_close(got, alone, **within)
        if batch.requests[i].query_len:
            torch.testing.assert_close(got, batch.full(i), **within)


@pytest.mark.parametrize("workspace_rows", [None, 16, 64, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_a_mixed_batch_equals_each_request_alone(
    page_size: int, workspace_rows: int | None
) -> None:
    check(Batch(MIXED, page_size, workspace_rows=workspace_rows))


@pytest.mark.parametrize("workspace_rows", [None, 16, 1000])
def test_a_mixed_batch_with_prompts_by_torch(workspace_rows: int | None) -> None:
    backend = WithPrompts(Absorbing(), "sdpa")
    check(Batch(MIXED, 16, backend=backend, workspace_rows=workspace_rows))


@pytest.mark.parametrize("workspace_rows", [None, 16, 64])
@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"])
def test_a_mixed_batch_over_quantised_rows_equals_each_request_alone(
    name: str, workspace_rows: int | None
) -> None:
    """New rows are read as they are stored, in one pass, in chunks and absorbed."""
    scale = {"k_scale": 2.0**-6} if name == "fp8" else {}
    made = cache_format(name, 128, 32, dtype=torch.float64, **scale)
    batch = Batch(
        MIXED, 16, backend=Absorbing(made), cache_format=made, workspace_rows=workspace_rows
    )
    everyone = range(len(MIXED))
    for i, got in zip(everyone, batch.run(everyone), strict=True):
        torch.testing.assert_close(got, batch.run([i])[0], **MERGED)
        assert got.isfinite().all()
    differs = (got - batch.full(len(MIXED) - 1)).abs().max()
    assert differs > 1e-4, "the rows are not quantised"


part_strategy = st.one_of(
    st.tuples(st.just(VERIFY), st.integers(0, 6), st.integers(0, 70)),
    st.tuples(st.just(EXTEND), st.integers(1, 12), st.integers(1, 70)),
    st.tuples(st.just(PROMPT), st.integers(1, 24), st.sampled_from([0, 0, 1, 16, 50])),
)


@given(
    st.lists(part_strategy, min_size=1, max_size=6),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([None, 1, 20, 60]),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_any_batch_equals_each_request_alone(
    parts: list[Part], page_size: int, workspace_rows: int | None, seed: int
) -> None:
    check(Batch(parts, page_size, workspace_rows=workspace_rows, seed=seed))


@pytest.mark.parametrize("name", ["triton", "rows"])
def test_a_mixed_batch_by_triton_errs_like_full(name: str) -> None:
    """`rows` is SINGLE_ONLY: its extends of more than one row go the other way."""
    pytest.importorskip("triton")
    check_errors(name, make_layer().float())


@pytest.mark.parametrize("format_name", ["fp8", "fp8_ds_mla", "fp8_per_token_head"])
def test_a_mixed_batch_over_codes_by_triton_errs_like_the_reference(format_name: str) -> None:
    pytest.importorskip("triton")
    check_errors("triton", make_layer().float(), format_name)
