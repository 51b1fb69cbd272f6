"""One assertion for a verify call: the specification in float64, within the error budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.cache.formats.fp8 import Fp8Format
from specmla.cache.formats.plain import quantised
from specmla.metadata import VerifyPart
from specmla.reference import absorbed_mqa
from specmla.testing.budget import Attended, assert_attention_within_budget
from specmla.testing.case import VerifyCase


def run_oracle(
    case: VerifyCase, part: VerifyPart, dtype: torch.dtype, rows: Tensor | None = None
) -> AttentionOutput:
    """Run the absorbed specification on a case, computing in `dtype`.

    Args:
        case: queries and cache.
        part: tables.
        dtype: of the computation.
        rows: [N, G, C + R] in place of what the cache holds.
    """
    return absorbed_mqa(
        case.q_latent.to(dtype),
        case.q_rope.to(dtype),
        case.rows() if rows is None else rows,
        part,
        softmax_scale=case.softmax_scale,
    )


@dataclass(frozen=True)
class Oracle:
    """What a right result for a case is, and how far a right one may be off.

    Attributes:
        dtype: of query, cache and result.
        exact: the specification in float64.
        plain: the specification in `dtype`.
        plain_lse: [T, H], LSE of the specification in float32 (in float64 for float64), of rows
            as products in `dtype` take them.
        score_width: A, products that a score sums.
    """

    dtype: torch.dtype
    exact: AttentionOutput
    plain: AttentionOutput
    plain_lse: Tensor
    score_width: int

    @classmethod
    def of(cls, case: VerifyCase, part: VerifyPart) -> Oracle:
        """Run the specification on a case with these tables."""
        dtype = case.spec.dtype
        plain = run_oracle(case, part, dtype)
        lse_dtype = torch.promote_types(dtype, torch.float32)
        # A row's own scales are multiplied into its codes before the products, which take `dtype`.
        rows = case.rows(dtype) if _scales_rows(case) else None
        plain_lse = plain.lse if lse_dtype is dtype else run_oracle(case, part, lse_dtype, rows).lse
        exact = run_oracle(case, part, torch.float64)
        return cls(dtype, exact, plain, plain_lse, case.spec.width)

    def check(self, got: Attended, *, factor: float = 2.0) -> None:
        """Assert that a result is right, in output, LSE and empty rows.

        Args:
            got: out [T, H, C] in the case's dtype, lse [T, H] float32.
            factor: as in `assert_within_budget`.

        Raises:
            AssertionError: names the result, the worst row, its error and the budget.
        """
        assert got.out.dtype is self.dtype, f"out is {got.out.dtype}, {self.dtype} expected"
        assert got.lse.dtype is torch.float32, f"lse is {got.lse.dtype}, torch.float32 expected"
        assert_attention_within_budget(
            got,
            self.exact,
            self.plain,
            self.plain_lse,
            score_width=self.score_width,
            factor=factor,
        )


def _scales_rows(case: VerifyCase) -> bool:
    """Whether the numbers of a cached row are codes times scales that lie in the row."""
    packed = quantised(case.spec.cache_format)
    return packed is not None and not isinstance(packed, Fp8Format)


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
    Oracle.of(case, part).check(got, factor=factor)
