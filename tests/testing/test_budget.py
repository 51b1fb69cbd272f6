from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from specmla.backends.base import AttentionOutput
from specmla.mask import DraftMask
from specmla.testing import (
    VerifyCase,
    assert_lse_within_budget,
    assert_matches_oracle,
    assert_within_budget,
    make_case,
    relative_error,
    row_errors,
    run_oracle,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def case_of(dtype: torch.dtype = torch.float32, **options: object) -> VerifyCase:
    return make_case("2q3s129,1q1s1,1q0s9", num_heads=12, kv_lora_rank=32, rope_dim=16,
                     page_size=16, dtype=dtype, **options)  # fmt: skip


def test_relative_error() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(exact, torch.zeros(2)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_is_never_finite_where_a_value_is_not(bad: float) -> None:
    assert relative_error(torch.tensor([3.0, bad]), torch.tensor([3.0, 4.0])) == math.inf
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, bad])) == math.inf
    assert row_errors(torch.tensor([[1.0], [bad]]), torch.ones(2, 1)).tolist() == [0, math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_result_is_within_the_budget(dtype: torch.dtype) -> None:
    case = case_of(dtype)
    part = case.tables()
    exact = run_oracle(case, part, torch.float64)
    assert_matches_oracle(AttentionOutput(exact.out.to(dtype), exact.lse), case, part)


def wrong_scale(case: VerifyCase) -> AttentionOutput:
    spec = dataclasses.replace(case.spec, softmax_scale=case.softmax_scale * 1.02)
    return run_oracle(dataclasses.replace(case, spec=spec), case.tables(), torch.float64)


def one_key_too_few_in_one_row(case: VerifyCase) -> AttentionOutput:
    part = case.tables()
    extent = part.row_extent.clone()
    extent[1] -= 1
    return run_oracle(case, dataclasses.replace(part, row_extent=extent), torch.float64)


def one_row_without_its_values(case: VerifyCase) -> AttentionOutput:
    got = run_oracle(case, case.tables(), torch.float64)
    got.out[2, 5] = 0.0
    return got


def one_nan(case: VerifyCase) -> AttentionOutput:
    got = run_oracle(case, case.tables(), torch.float64)
    got.out[2, 5, 7] = math.nan
    return got


def lse_in_base_two(case: VerifyCase) -> AttentionOutput:
    got = run_oracle(case, case.tables(), torch.float64)
    return AttentionOutput(got.out, got.lse / math.log(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "make",
    [wrong_scale, one_key_too_few_in_one_row, one_row_without_its_values, one_nan, lse_in_base_two],
)
def test_a_wrong_result_is_outside_the_budget(make: object, dtype: torch.dtype) -> None:
    case = case_of(dtype)
    wrong = make(case)
    with pytest.raises(AssertionError):
        assert_matches_oracle(AttentionOutput(wrong.out.to(dtype), wrong.lse), case, case.tables())


def test_scores_summed_in_order_are_within_the_budget_and_tf32_scores_are_not() -> None:
    case = make_case([(3, 700)], num_heads=4, dtype=torch.float32)
    exact = run_oracle(case, case.tables(), torch.float64)
    # What the first of three rows sees; cells beyond the length are absurd on purpose.
    page_ids = case.tables().block_table[0, : -(-698 // case.latent_cache.shape[1])].long()
    keys = case.latent_cache[page_ids].flatten(0, 1)[:698].double()
    query = torch.cat((case.q_latent, case.q_rope), dim=-1)[0]

    def first_row(scores: torch.Tensor) -> AttentionOutput:
        got = AttentionOutput(exact.out.clone(), exact.lse.clone())
        scaled = scores.double() * case.softmax_scale
        got.out[0] = scaled.softmax(dim=-1) @ keys[:, : exact.out.shape[-1]]
        got.lse[0] = scaled.logsumexp(dim=-1)
        return AttentionOutput(got.out.float(), got.lse.float())

    in_order = torch.zeros(4, 698)
    for j in range(query.shape[-1]):
        in_order += query[:, j, None] * keys[:, j].float()
    assert_matches_oracle(first_row(in_order), case, case.tables())

    def tf32(x: torch.Tensor) -> torch.Tensor:
        return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()

    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_matches_oracle(first_row(tf32(query) @ tf32(keys).T), case, case.tables())


def test_a_row_without_keys_must_be_exactly_empty() -> None:
    case = make_case([(2, 1), (1, 5)], num_heads=2, kv_lora_rank=16, rope_dim=8)
    got = run_oracle(case, case.tables(), torch.float32)
    assert_matches_oracle(got, case, case.tables())
    got.out[0, 0, 0] = 1e-30
    with pytest.raises(AssertionError, match="not exactly 0"):
        assert_matches_oracle(got, case, case.tables())
    got.out[0, 0, 0] = 0.0
    got.lse[0, 0] = -5e4
    with pytest.raises(AssertionError, match="-inf stands at the wrong rows"):
        assert_matches_oracle(got, case, case.tables())


def test_dtypes_and_shapes_must_agree() -> None:
    case = case_of(mask=DraftMask.FULL)
    got = run_oracle(case, case.tables(), torch.float64)
    with pytest.raises(AssertionError, match=r"out is torch\.float64"):
        assert_matches_oracle(got, case, case.tables())
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(got.out[1:], got.out, got.out)
    with pytest.raises(AssertionError, match="shape"):
        assert_lse_within_budget(got.lse[1:], got.lse, got.lse, score_width=24)


def test_the_message_names_the_worst_row() -> None:
    exact = torch.ones(4, 3, 8, dtype=torch.float64)
    got = exact.clone()
    got[2, 1] += 0.5
    with pytest.raises(AssertionError, match=r"out: error 5\.000e-01 at row \[2, 1\].*1 of 12"):
        assert_within_budget(got, exact, exact)


def test_a_plain_computation_that_is_not_finite_sets_no_budget() -> None:
    exact = torch.ones(2, 3, 8, dtype=torch.float64)
    with pytest.raises(AssertionError, match="plain computation is not finite"):
        assert_within_budget(exact, exact, exact * math.nan)
    with pytest.raises(AssertionError, match="plain computation is not finite"):
        assert_lse_within_budget(exact[0], exact[0], exact[0] * math.nan, score_width=8)
