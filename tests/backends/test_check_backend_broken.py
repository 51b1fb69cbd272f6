"""Broken backends, and the case of `check_backend` that shows each of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.metadata import VerifyPart
from specmla.reference import absorbed_mqa, merge_attention_states
from specmla.testing import CheckReport, check_backend


def check(backend: AttentionBackend, only: str = "") -> CheckReport:
    return check_backend(backend, device="cpu", dtypes=[torch.float32], only=only)


class Wrapped(ReferenceBackend):
    """Plans nothing by itself; `attend` may change the part and the result."""

    def plan(self, part: VerifyPart, **options: Any) -> VerifyPart:
        return dataclasses.replace(part, plan=options)

    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        **options: Any,
    ) -> AttentionOutput:
        def run(changed: VerifyPart, cache: Tensor = latent_cache) -> AttentionOutput:
            planned = ReferenceBackend.plan(self, changed, **part.plan)
            return ReferenceBackend.forward_mqa(self, q_latent, q_rope, cache, planned, **options)

        return self.attend(run, part)

    def attend(self, run: Callable[..., AttentionOutput], part: VerifyPart) -> AttentionOutput:
        return run(part)


def with_extents(part: VerifyPart, change: Callable[[Tensor], Tensor]) -> VerifyPart:
    return dataclasses.replace(part, row_extent=change(part.row_extent).int())


class SeesOneKeyLess(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        return run(with_extents(part, lambda e: e - 1))


class SeesTheNextDraft(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        rows = torch.tensor(part.query_lens)
        lens = part.seq_lens.repeat_interleave(rows)
        return run(with_extents(part, lambda e: torch.minimum(e + 1, lens)))


class DropsTheLastKeyOfASplit(Wrapped):
    """Splits at 4096, as a kernel would; the first split ends a key too early."""

    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        start = torch.zeros_like(part.row_extent) if part.row_start is None else part.row_start
        head = run(with_extents(part, lambda e: e.clamp(max=4095)))
        tail = run(dataclasses.replace(part, row_start=start.clamp(min=4096)))
        return AttentionOutput(*merge_attention_states(*head, *tail))


class ReadsPastTheLength(Wrapped):
    """A masked block that is loaded whole: its weights are 0, but 0 * NaN is NaN."""

    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        got = run(part)
        longer = torch.where(part.seq_lens % part.page_size > 0, part.seq_lens + 1, part.seq_lens)
        part = dataclasses.replace(part, seq_lens=longer, max_seq_len=part.max_seq_len + 1)
        rows = torch.tensor(part.query_lens)
        past = run(with_extents(part, lambda e: longer.repeat_interleave(rows)))
        keep = torch.where(past.lse.isnan()[..., None], math.nan, 0.0)
        return AttentionOutput(got.out + keep, got.lse)


class FollowsUnusedCells(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        worst = int(part.block_table.max()) if part.num_rows else 0
        if worst >= 2**20:
            raise IndexError(f"page {worst} is outside the pool")
        return run(part)


class LeavesRowsOfEmptyRequests(Wrapped):
    """Skips rows without keys: they hold what an earlier call left there."""

    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        got = run(part)
        out, lse = torch.empty_like(got.out), torch.empty_like(got.lse)
        seen = got.lse != -math.inf
        out[seen], lse[seen] = got.out[seen], got.lse[seen]
        lse[~seen] = -math.inf
        return AttentionOutput(out, lse)


class ForgetsTheEmptyState(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        got = run(part)
        return AttentionOutput(got.out, got.lse.clamp(min=-1e30))


class DiffersBetweenRepeats(Wrapped):
    calls = 0

    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        got = run(part)
        self.calls += 1
        return AttentionOutput(got.out * (1 + 2.0**-23 * (self.calls % 7 == 5)), got.lse)


class IgnoresWindows(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        return run(dataclasses.replace(part, row_start=None))


class TakesTreesForChains(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        return run(dataclasses.replace(part, tree_bits=None))


class GivesLseInBaseTwo(Wrapped):
    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        got = run(part)
        return AttentionOutput(got.out, got.lse / math.log(2))


class KeepsItsOutput(Wrapped):
    """Hands out one buffer for all calls of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[Any, Tensor] = {}

    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        got = run(part)
        out = self.buffers.setdefault(got.out.shape, torch.zeros_like(got.out))
        return AttentionOutput(out.copy_(got.out), got.lse)


class WritesIntoTheCache(Wrapped):
    def forward_mqa(self, *tensors: Tensor, **options: Any) -> AttentionOutput:
        got = super().forward_mqa(*tensors, **options)
        tensors[2].select(1, -1).nan_to_num_(0.0)  # what stands there counts in no case
        return got


class Invariant(ReferenceBackend):
    """Computes each row in float64: its bits depend on nothing else."""

    batch_invariant = True

    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        **options: Any,
    ) -> AttentionOutput:
        got = absorbed_mqa(q_latent.double(), q_rope.double(), latent_cache, part, **options)
        return self.spoil(AttentionOutput(got.out.to(q_latent.dtype), got.lse), part)

    def spoil(self, got: AttentionOutput, part: VerifyPart) -> AttentionOutput:
        return got


def one_unit_more(got: AttentionOutput) -> AttentionOutput:
    return AttentionOutput(torch.nextafter(got.out, got.out * 2), got.lse)


class DependsOnTheBatch(Invariant):
    def spoil(self, got: AttentionOutput, part: VerifyPart) -> AttentionOutput:
        return one_unit_more(got) if part.num_requests == 1 else got


class DependsOnTheRows(Invariant):
    def spoil(self, got: AttentionOutput, part: VerifyPart) -> AttentionOutput:
        return one_unit_more(got) if part.max_query_len == 1 else got


BROKEN: list[tuple[type[ReferenceBackend], str, str]] = [
    (SeesOneKeyLess, "contexts", r"-inf stands at the wrong rows.*query_len 1, seq_len 1,"),
    (SeesOneKeyLess, "long", r"exceeds the budget"),
    (SeesTheNextDraft, "tail-q2s513", r"exceeds the budget.*row 0 of request 0"),
    (DropsTheLastKeyOfASplit, "tail-q16s4097", r"exceeds the budget.*seq_len 4097"),
    (ReadsPastTheLength, "tail-q16s4097", r"error inf"),
    (FollowsUnusedCells, "page-16", r"raised IndexError: page 2147483647"),
    (LeavesRowsOfEmptyRequests, "no-keys", r"a row without keys is not exactly 0.*query_len 4"),
    (ForgetsTheEmptyState, "totals", r"-inf stands at the wrong rows"),
    (DiffersBetweenRepeats, "repeats-many", r"3 of 20 repeats differ from the first run"),
    (IgnoresWindows, "windows", r"exceeds the budget|-inf stands"),
    (TakesTreesForChains, "mask-tree", r"exceeds the budget"),
    (GivesLseInBaseTwo, "decodes", r"lse: error .* exceeds the budget"),
    (KeepsItsOutput, "repeats-many", r"the second of three layers.*exceeds"),
    (WritesIntoTheCache, "repeats-many", r"wrote into latent_cache"),
    (DependsOnTheBatch, "rows", r"batch_invariant, but request 0 alone differs"),
    (DependsOnTheRows, "rows", r"batch_invariant, but as decodes.*rows differ in their bits"),
]


@pytest.mark.parametrize(("backend", "name", "message"), BROKEN)
def test_a_broken_backend_is_caught(
    backend: type[ReferenceBackend], name: str, message: str
) -> None:
    report = check(backend(), only=f"^{name}$")
    assert report.passed == []
    (failure,) = report.failures
    assert failure.name == name
    assert re.search(message, failure.message), failure.message
    assert failure.case.startswith("make_case([(")
    with pytest.raises(AssertionError, match=rf"{name}: .*\n    make_case\("):
        report.raise_if_failed()


def test_a_backend_that_keeps_batch_invariance_passes() -> None:
    check(Invariant(), only="^rows$|^windows$|mask-full").raise_if_failed()


def test_wrapped_but_right_backends_pass() -> None:
    check(Wrapped(), only="q2s513|^rows|repeats-many|no-|windows$").raise_if_failed()


class WrapsPageOffsets(Wrapped):
    """Multiplies page and stride in 32 bits; what leaves them reads page 0."""

    def attend(self, run: Any, part: VerifyPart) -> AttentionOutput:
        stride = part.page_size * 576
        fits = part.block_table.long() * stride < 2**31
        return run(dataclasses.replace(part, block_table=part.block_table * fits))


def test_offsets_in_32_bits_are_caught() -> None:
    report = check(WrapsPageOffsets(), only="^far-pages$|^totals$")
    if report.skipped:
        pytest.skip(report.skipped[0].reason)
    assert [f.name for f in report.failures] == ["far-pages"]
    assert "with far pages" in report.failures[0].message
