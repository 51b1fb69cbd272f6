"""Tolerances from an error budget: measured against float64, never picked by taste.

A kernel and a plain computation in the same dtype read the same rounded inputs and make the same
kinds of rounding (probabilities before the value product, the output once more), the plain one some
more (its scores). So the plain computation's error against float64 says how large a correct error
is for this data. Both errors are maxima over many rows of like distribution; a different summation
order moves a maximum by a small factor. Hence

    max over rows of the kernel's error <= factor * max over rows of the plain error + floor

with `factor` 2 and a floor of one rounding unit of the dtype, for data where the plain computation
happens to be exact (one key: its value comes out unrounded). In float32 the floor is larger, for
what a fused kernel does and a plain computation does not:

- It works in base 2 with the hardware's exp2 and log2, good to 2^-22 (4 units), and a unit of a
  base-2 score, 1.44 times the size of the LSE, moves its weight by that share.
- It may sum the A products of a score one after the other, where a BLAS sums them in blocks. The
  error of a sum of A terms grows as sqrt(A) rounding units (half an eps each) of its size (Higham
  and Mary, 2019), and the score that matters is about as large as the LSE. In one row of the GPU
  tests, a sum in order is off by 7.9e-6, a BLAS by 0.8e-6, and sqrt(A) * u * LSE is 1.2e-5.

A dropped or doubled key, a wrong scale or a shifted mask in a single row exceed all this by orders
of magnitude at the sizes tests use.

In float64 itself no better oracle exists: the plain error is that of another summation order, often
0, and the floor is 1e-12, which a sum of A = 576 products and S = 1000 keys stays below
((A + S) * 2^-52 = 3.5e-13 at the very worst).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_FLOAT64_FLOOR = 1e-12


class RowError(AssertionError):
    """A row is wrong; `row` is its place, [t, h]."""

    def __init__(self, message: str, row: Sequence[int]) -> None:
        super().__init__(message)
        self.row = tuple(row)


class Attended(Protocol):
    """An attention result: out [T, H, D] and its natural-log LSE [T, H]."""

    @property
    def out(self) -> Tensor:
        """Values."""

    @property
    def lse(self) -> Tensor:
        """Natural-log LSE."""


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Give ||got - exact|| / ||exact|| over all elements, in float64.

    0 if both are exactly zero, infinite if only `exact` is; any NaN or infinity gives infinity.
    """
    return float(row_errors(got.reshape(1, -1), exact.reshape(1, -1))[0])


def row_errors(got: Tensor, exact: Tensor) -> Tensor:
    """Give ||got - exact|| / ||exact|| over the last dimension, as `relative_error` does.

    Args:
        got: [..., D], any dtype.
        exact: [..., D], float64 where it is an oracle.
    """
    truth = exact.double()
    distance = (got.to(truth.device).double() - truth).norm(dim=-1)
    size = truth.norm(dim=-1)
    errors = torch.where(distance == 0, 0.0, distance / size)
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def assert_within_budget(
    got: Tensor,
    exact: Tensor,
    plain: Tensor,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    label: str = "out",
) -> None:
    """Assert that each row's error stays within the budget of the module's docstring.

    Args:
        got: [..., D], what is tested; its dtype sets the floor.
        exact: [..., D] float64.
        plain: [..., D], a plain computation in the dtype of `got`.
        factor: how much larger the worst row may be than the plain one's worst.
        floor: relative error that is always allowed; one rounding unit of the dtype if None.
        label: name used in the message.

    Raises:
        AssertionError: a shape differs, a row is not finite, or the budget is exceeded; the
            message gives the worst row.
    """
    assert got.shape == exact.shape, (
        f"{label}: shape {tuple(got.shape)}, {tuple(exact.shape)} expected"
    )
    if not got.numel():
        return
    errors = row_errors(got, exact)
    least = _floor(got.dtype) if floor is None else floor
    limit = factor * float(row_errors(plain, exact).max()) + least
    _assert_below(errors, limit, label)


def assert_lse_within_budget(
    got: Tensor,
    exact: Tensor,
    plain: Tensor,
    *,
    score_width: int,
    factor: float = 2.0,
    label: str = "lse",
) -> None:
    """Assert that a natural-log LSE is right: -inf where it must be, else in absolute error.

    An LSE is float32 in every dtype of the query, from float32 scores, so `plain` is a float32
    computation on the same (rounded) inputs. The floor is 4 rounding units at the LSE's size, for
    the roundings of base 2 (the score's and the sum's, both 1.44 times as large, and the way back),
    4 units of 1 for the hardware's exp2 and log2, and the sum of `score_width` products in order.

    Args:
        got: [T, H] float32.
        exact: [T, H] float64.
        plain: [T, H], a plain computation in float32 at least.
        score_width: A, products that a score sums.
        factor: as in `assert_within_budget`.
        label: name used in the message.

    Raises:
        AssertionError: a shape differs, -inf stands at other rows, or the budget is exceeded.
    """
    assert got.shape == exact.shape, (
        f"{label}: shape {tuple(got.shape)}, {tuple(exact.shape)} expected"
    )
    if not got.numel():
        return
    truth, value = exact.double(), got.to(exact.device).double()
    empty = truth == -torch.inf
    _assert_no_row((value == -torch.inf) != empty, f"{label}: -inf stands at the wrong rows")
    keep = ~empty
    if not keep.any():
        return
    largest = float(truth[keep].abs().max().clamp(min=1.0))
    plain_error = float((plain.to(exact.device).double() - truth)[keep].abs().max())
    errors = torch.where(keep, (value - truth).abs(), 0.0)
    errors = errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
    floor = 4 * (largest + 1) * torch.finfo(torch.float32).eps + _score_error(largest, score_width)
    _assert_below(errors, factor * plain_error + floor, label)


def assert_attention_within_budget(
    got: Attended,
    exact: Attended,
    plain: Attended,
    plain_lse: Tensor,
    *,
    score_width: int,
    factor: float = 2.0,
) -> None:
    """Assert both results of an attention call, and that rows without keys are the empty state.

    Args:
        got: what is tested.
        exact: an oracle run in float64.
        plain: the oracle run in the dtype of `got.out`.
        plain_lse: [T, H], the LSE of the oracle run in float32 (or in float64 for float64 input).
        score_width: A, products that a score sums: C + R absorbed, P + R up-projected.
        factor: as in `assert_within_budget`.

    Raises:
        AssertionError: as the two assertions above, or a row without keys is not exactly 0.
    """
    assert_lse_within_budget(got.lse, exact.lse, plain_lse, score_width=score_width, factor=factor)
    empty = got.lse == -torch.inf
    stale = empty & (got.out != 0).any(-1)
    _assert_no_row(stale, "out: a row without keys is not exactly 0")
    floor = None
    if got.out.dtype is torch.float32 and not bool(empty.all()):
        size = float(exact.lse[exact.lse != -torch.inf].abs().max())
        floor = (4 + 1.44 * size) * torch.finfo(torch.float32).eps
        floor += _score_error(size, score_width)
    assert_within_budget(got.out, exact.out, plain.out, factor=factor, floor=floor)


def _score_error(size: float, score_width: int) -> float:
    """Give what summing a score of this size in float32, product after product, may be off by."""
    return math.sqrt(score_width) * size * torch.finfo(torch.float32).eps / 2


def _floor(dtype: torch.dtype) -> float:
    return _FLOAT64_FLOOR if dtype is torch.float64 else torch.finfo(dtype).eps


def _assert_below(errors: Tensor, limit: float, label: str) -> None:
    assert math.isfinite(limit), f"{label}: the oracle or the plain computation is not finite"
    worst = float(errors.max())
    if worst <= limit:
        return
    at = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]
    bad = int((errors > limit).sum())
    raise RowError(
        f"{label}: error {worst:.3e} at row {at} exceeds the budget {limit:.3e}; "
        f"{bad} of {errors.numel()} rows do",
        at,
    )


def _assert_no_row(wrong: Tensor, message: str) -> None:
    found = wrong.nonzero().tolist()
    if found:
        many = f"{len(found)} of {wrong.numel()} rows are"
        raise RowError(f"{message}; row {found[0]} is, {many}", found[0])
