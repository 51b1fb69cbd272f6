"""One assertion for a verify call: the specification in float64, within the error budget."""

from __future__ import annotations

import torch

from specmla.backends.base import AttentionOutput
from specmla.metadata import VerifyPart
from specmla.reference import absorbed_mqa
from specmla.testing.budget import Attended, assert_attention_within_budget
from specmla.testing.case import VerifyCase


def run_oracle(case: VerifyCase, part: VerifyPart, dtype: torch.dtype) -> AttentionOutput:
    """Run the absorbed specification on a case, computing in `dtype`."""
    return absorbed_mqa(
        case.q_latent.to(dtype),
        case.q_rope.to(dtype),
        case.latent_cache,
        part,
        softmax_scale=case.softmax_scale,
    )


def assert_matches_oracle(
    got: Attended, case: VerifyCase, part: VerifyPart, *, factor: float = 2.0
) -> None:
    """Assert that an attention result for `case` is right, in output, LSE and empty rows.

    Args:
        got: out [T, H, C] in the case's dtype, lse [T, H] float32.
        part: the tables it was computed with; `VerifyCase.tables()` will do.
        factor: as in `assert_within_budget`.

    Raises:
        AssertionError: names the result, the worst row, its error and the budget.
    """
    dtype = case.spec.dtype
    assert got.out.dtype is dtype, f"out is {got.out.dtype}, {dtype} expected"
    assert got.lse.dtype is torch.float32, f"lse is {got.lse.dtype}, torch.float32 expected"
    plain = run_oracle(case, part, dtype)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    assert_attention_within_budget(
        got,
        run_oracle(case, part, torch.float64),
        plain,
        plain.lse if lse_dtype is dtype else run_oracle(case, part, lse_dtype).lse,
        score_width=case.latent_cache.shape[-1],
        factor=factor,
    )
