"""Examines one case: the right result first, then what else is asked of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.cache.formats.plain import quantised
from specmla.mask import row_extents
from specmla.metadata import VerifyPart
from specmla.testing.budget import RowError
from specmla.testing.case import VerifyCase, make_case
from specmla.testing.check_case import Check, CheckCase
from specmla.testing.far_pages import move_far
from specmla.testing.oracle import Oracle
from specmla.testing.poison import PoisonedMemory

LOUD = 1.0e4
"""Value of a key that must not be heard by the rows before it."""


class Examination:
    """Runs the checks of one case on one backend; all memory it allocates starts as NaN.

    Args:
        backend: what is examined.
        wanted: the case and what is asked of it.
        repeats: runs of `Check.REPEATS`.
    """

    def __init__(self, backend: AttentionBackend, wanted: CheckCase, repeats: int) -> None:
        self.backend, self.wanted, self.repeats = backend, wanted, repeats
        self.is_invariant = bool(getattr(backend, "batch_invariant", False))
        self.case = make_case(**vars(wanted.spec))
        self.oracle = Oracle.of(self.case, self.case.tables())

    def run(self) -> None:
        """Run the case and its checks.

        Raises:
            AssertionError: the first thing that is wrong; it names check, row and request.
            NoRoomError: far pages don't fit the device.
        """
        first = self._run_first()
        self._check_right(first, self.case, "")
        if self.wanted.far:
            far = _attend(self.backend, move_far(self.case))
            self._check_right(far, self.case, "with far pages: ")
            self._check_same(far, first, self.case, "with far pages")
        checks = {
            Check.REPEATS: self._check_repeats,
            Check.DECODES: self._check_decodes,
            Check.LAYERS: self._check_layers,
            Check.FILLS: self._check_fills,
            Check.LEAK: self._check_leak,
        }
        for check, run in checks.items():
            if check in self.wanted.checks:
                run(first)

    def _run_first(self) -> AttentionOutput:
        """Run the case; where layers are checked, see that the call leaves its inputs alone."""
        if Check.LAYERS not in self.wanted.checks:
            return _attend(self.backend, self.case)
        names = ("q_latent", "q_rope", "latent_cache")
        before = [_bits(getattr(self.case, name)).clone() for name in names]
        first = _attend(self.backend, self.case)
        for name, then in zip(names, before, strict=True):
            same = torch.equal(_bits(getattr(self.case, name)), then)
            assert same, f"the call wrote into {name}"
        return first

    def _check_right(self, got: AttentionOutput, case: VerifyCase, when: str) -> None:
        try:
            self.oracle.check(got)
        except RowError as error:
            raise AssertionError(f"{when}{error}; {_place(case, error.row[0])}") from error
        except AssertionError as error:
            raise AssertionError(f"{when}{error}") from error

    def _check_same(
        self, got: AttentionOutput, want: AttentionOutput, case: VerifyCase, when: str
    ) -> None:
        rows = _differing_rows(got, want)
        if rows:
            raise AssertionError(
                f"{when}: {len(rows)} rows differ in their bits; {_place(case, rows[0])}"
            )

    def _check_repeats(self, first: AttentionOutput) -> None:
        """Compare on the device, so that runs follow each other without a pause."""
        part = self.case.planned(self.backend)
        flags = []
        with PoisonedMemory():
            for _ in range(self.repeats):
                flags.append(_differ(_forward(self.backend, self.case, part), first).any())
            part = self.case.planned(self.backend, part)  # may reuse what the first plan holds
            replanned = _forward(self.backend, self.case, part)
        again = _attend(self.backend, self.case)  # with a plan of its own
        differing = torch.stack(flags).nonzero().flatten().tolist() if flags else []
        if differing:
            raise AssertionError(
                f"{len(differing)} of {self.repeats} repeats differ from the first run in their "
                f"bits, the first is repeat {differing[0]}: a race, or state that a call leaves"
            )
        self._check_same(again, first, self.case, "planned again")
        self._check_same(replanned, first, self.case, "planned again on a part with a plan")

    def _check_decodes(self, first: AttentionOutput) -> None:
        """Check each row as a request of one row; and each request alone, if bits should agree."""
        got = _attend(self.backend, _as_decodes(self.case))
        self._check_right(got, self.case, "as decodes of one row each: ")
        if not self.is_invariant:
            return
        label = "the backend is batch_invariant, but as decodes of one row each"
        self._check_same(got, first, self.case, label)
        starts = self.case.tables().query_start.tolist()
        for i, (start, stop) in enumerate(itertools.pairwise(starts)):
            rows = slice(start, stop)
            got = _attend(self.backend, _select(self.case, i, rows))
            want = AttentionOutput(first.out[rows], first.lse[rows])
            label = f"the backend is batch_invariant, but request {i} alone"
            if _differing_rows(got, want):
                raise AssertionError(f"{label} differs in its bits from the batch")

    def _check_layers(self, first: AttentionOutput) -> None:
        """Use one plan for two layers in turn; results outlive later calls."""
        part = self.case.planned(self.backend)
        other = dataclasses.replace(self.case, latent_cache=_halved(self.case))
        with PoisonedMemory():
            layers = [_forward(self.backend, c, part) for c in (self.case, other, self.case)]
        self._check_same(layers[0], first, self.case, "the first of three layers of one plan")
        self._check_same(layers[2], first, self.case, "the third of three layers of one plan")
        oracle = self.oracle
        self.oracle = Oracle.of(other, other.tables())
        self._check_right(layers[1], other, "the second of three layers of one plan: ")
        self.oracle = oracle

    def _check_fills(self, first: AttentionOutput) -> None:
        """Let other bits stand in slots, pages and cells that are nobody's."""
        for poison, cell in ((math.inf, -1), (0.0, 0)):
            spec = dataclasses.replace(self.wanted.spec, poison=poison, unused_cell=cell)
            got = _attend(self.backend, make_case(**vars(spec)))
            label = f"with {poison} in unused slots and {cell} in unused table cells"
            self._check_same(got, first, self.case, label)

    def _check_leak(self, first: AttentionOutput) -> None:
        """Make each request's last key loud: only its last row may change."""
        cache = self.case.latent_cache.clone(memory_format=torch.preserve_format)
        loud = dataclasses.replace(self.case, latent_cache=cache)
        starts, out, lse = self.case.tables().query_start.tolist(), first.out, first.lse
        last = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
        for i, r in enumerate(self.case.requests):
            if r.query_len and r.seq_len:
                slot = int(self.case.slots(i)[-1])
                page, place = divmod(slot, self.case.spec.page_size)
                cache[page, place] = _loud_row(self.case)
                last[starts[i + 1] - 1] = True
        got = _attend(self.backend, loud)
        out = torch.where(last[:, None, None], out, got.out)
        lse = torch.where(last[:, None], lse, got.lse)
        label = f"with {LOUD:.0f} in the last key of each request, in the rows before it: "
        self._check_right(AttentionOutput(out, lse), self.case, label)


def _halved(case: VerifyCase) -> Tensor:
    """Give a cache of half the numbers, in the same strides."""
    packed = quantised(case.spec.cache_format)
    if packed is None:
        return case.latent_cache * 0.5
    rows = case.rows(torch.float32).flatten(0, 1).mul(0.5).to(case.spec.dtype)
    rank = case.spec.kv_lora_rank
    made = torch.empty_like(case.latent_cache)
    return made.copy_(packed.quantise(rows[:, :rank], rows[:, rank:]).view(made.shape))


def _loud_row(case: VerifyCase) -> Tensor:
    """Give a row of `LOUD`, as the cache holds it; a code may saturate before."""
    spec, packed = case.spec, quantised(case.spec.cache_format)
    row = torch.full((1, spec.width), LOUD, dtype=spec.dtype, device=case.latent_cache.device)
    rank = spec.kv_lora_rank
    return row[0] if packed is None else packed.quantise(row[:, :rank], row[:, rank:])[0]


def _forward(backend: AttentionBackend, case: VerifyCase, part: VerifyPart) -> AttentionOutput:
    return backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )


def _attend(backend: AttentionBackend, case: VerifyCase) -> AttentionOutput:
    with PoisonedMemory():
        got = _forward(backend, case, case.planned(backend))
    if got.out.device.type == "cuda":
        torch.cuda.synchronize(got.out.device)  # an illegal access belongs to this case
    # A copy: a backend that hands out one buffer twice must not be compared with itself.
    return AttentionOutput(got.out.clone(), got.lse.clone())


def _as_decodes(case: VerifyCase) -> VerifyCase:
    """Make each row a request of its own, as long as what the row sees."""
    requests = [
        r._replace(query_len=1, seq_len=extent)
        for r in case.requests
        for extent in row_extents(case.spec.mask, r.query_len, r.seq_len)
    ]
    return dataclasses.replace(case, requests=tuple(requests))


def _select(case: VerifyCase, request: int, rows: slice) -> VerifyCase:
    return dataclasses.replace(
        case,
        q_latent=case.q_latent[rows],
        q_rope=case.q_rope[rows],
        requests=(case.requests[request],),
    )


def _bits(tensor: Tensor) -> Tensor:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(bits[tensor.element_size()])


def _differ(got: AttentionOutput, want: AttentionOutput) -> Tensor:
    """Which rows differ in their bits, [T] bool on the device."""
    out = (_bits(got.out) != _bits(want.out)).flatten(1).any(1)
    return out | (_bits(got.lse) != _bits(want.lse)).any(1)


def _differing_rows(got: AttentionOutput, want: AttentionOutput) -> Sequence[int]:
    return [int(row) for row in _differ(got, want).nonzero().flatten()]


def _place(case: VerifyCase, row: int) -> str:
    """Say whose row of a case the packed row is."""
    first = 0
    for i, r in enumerate(case.requests):
        if row < first + r.query_len:
            return (
                f"packed row {row} is row {row - first} of request {i} "
                f"(query_len {r.query_len}, seq_len {r.seq_len}, window_start {r.window_start})"
            )
        first += r.query_len
    return f"packed row {row} is no request's"
