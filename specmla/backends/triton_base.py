"""What the backends over Triton kernels share: where they run, their plan, prompts by MHA."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specmla.backends.base import Requirements
from specmla.backends.format_reasons import form_reasons, name_reasons
from specmla.backends.triton_prompts import TritonPrompts
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.errors import require
from specmla.kernels import inputs
from specmla.kernels.plan import (
    CutRule,
    PiecePlan,
    StepShape,
    fitting_plan,
    num_resident,
    plan_bounds,
    plan_buffers,
)
from specmla.query_form import Fp8Query

if TYPE_CHECKING:
    from specmla.backends.step_size import StepSize
    from specmla.buffers import Buffer
    from specmla.kernels.launch import LaunchEntry

PIECE_KEYS = 1024
"""Keys of a piece of batch-invariant results."""


class TritonKernelsBackend(TritonPrompts):
    """A backend whose kernels are Triton's.

    Args:
        num_splits: pieces of every tile instead of balanced ones (tests, sweeps).
        config: launch entry of the decode kernel instead of the table's.
        batch_invariant: cut at multiples of `piece_keys` and run one form of the kernels: the bits
            of a row depend on its own query and keys alone, not on other requests nor on how many
            rows its request brings. Scratch then grows with the width of the block table.
        piece_keys: keys of such a piece.
        cache_format: quantised format of the caches to read, one of `capabilities.formats`.
        query_form: of e4m3 queries, over one of `capabilities.fp8_query`; bare codes are multiplied
            with bare codes, in the format's dtype, which holds them exactly.

    Raises:
        ArgumentError: another format, fewer than one split or key, or splits of batch-invariant
            results.
    """

    def __init__(
        self,
        num_splits: int | None = None,
        config: LaunchEntry | None = None,
        *,
        batch_invariant: bool = False,
        piece_keys: int = PIECE_KEYS,
        cache_format: CacheFormat | None = None,
        query_form: Fp8Query | None = None,
    ) -> None:
        found = name_reasons(cache_format, self.capabilities.formats)
        found += form_reasons(query_form, cache_format, self.capabilities.fp8_query)
        if num_splits is not None and num_splits < 1:
            found.append(f"num_splits is {num_splits}, accepted are None and values >= 1")
        if num_splits is not None and batch_invariant:
            found.append(f"num_splits is {num_splits}, accepted with batch_invariant is None")
        if piece_keys < 1:
            found.append(f"piece_keys is {piece_keys}, accepted are values >= 1")
        require(found, type(self).__name__)
        self.config, self.batch_invariant = config, batch_invariant
        self.cache_format, self.query_form = quantised(cache_format), query_form
        self.rule = CutRule(num_splits, piece_keys if batch_invariant else None)

    def problems(self, need: Requirements) -> list[str]:
        """List what is in the way, the interpreter's limits on a CPU included."""
        found = super().problems(need)
        if self.unavailable():
            return found
        from specmla.kernels.prims import INTERPRETED

        return found + inputs.device_problems(need.device, need.dtype, INTERPRETED)

    @abc.abstractmethod
    def step_form(self, size: StepSize) -> tuple[StepShape, LaunchEntry]:
        """Give the shape that the kernel sees a step in, and its launch parameters."""

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what `plan` reserves: records and partial results of the pieces."""
        shape, entry = self.step_form(size)
        resident = num_resident(entry, size.device)
        bounds = plan_bounds(shape, entry, self.rule, size.table_keys, resident)
        return list(plan_buffers(shape, entry, bounds))

    def make_plan(
        self, earlier: object, size: StepSize, query_start: Tensor | None, seq_lens: Tensor
    ) -> PiecePlan:
        """Cut a step on the device, in the buffers of `earlier` if that plan fits.

        Args:
            earlier: the part's plan so far.
            size: of the step.
            query_start: [B + 1] int32, or None: one row a request. seq_lens: [B] int32.

        Raises:
            ArgumentError: `piece_keys` is no multiple of the entry's steps.
        """
        from specmla.kernels.pieces import fill_plan

        shape, entry = self.step_form(size)
        keys = self.rule.piece_keys
        wrong = keys is not None and keys % entry.block_n
        require(
            [f"piece_keys is {keys}, accepted are multiples of {entry.block_n}"] if wrong else [],
            f"{type(self).__name__}.plan",
        )
        plan = fitting_plan(earlier, shape, entry, self.rule, size.table_keys, seq_lens.device)
        with torch.cuda.device_of(seq_lens):
            fill_plan(plan, query_start, seq_lens)
        return plan
