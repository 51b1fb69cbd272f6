"""FlashMLA's dense decode kernel for Hopper as a provider, from its own operator library.

The operator is `specmla.backends.flashmla_op`'s. The first call makes the schedule, later ones take
it: that is its plan. It knows one Q a batch, so that ragged requests are padded in front to the
longest (a causal row counts from the last key).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Requirements
from specmla.backends.flashmla_op import (
    OPERATOR,
    PAGE_SIZE,
    Schedule,
    dense_decode,
    flashmla_library,
)
from specmla.bench.peers import lse_or_nan, shape_problems
from specmla.mask import DraftMask
from specmla.testing import VerifyCase, make_verify_part


@dataclass(frozen=True)
class FlashMLAPlan:
    """What every call takes.

    Attributes:
        query: [B, Q, H, A], Q the longest; padding rows are zero.
        seq_lens: [B] int32. block_table: [B, M] int32.
        real_rows: [T] int64, where the packed rows lie in B * Q, or None if all are real.
        schedule: of the first call.
    """

    query: Tensor
    seq_lens: Tensor
    block_table: Tensor
    real_rows: Tensor | None
    schedule: Schedule | None = None


class FlashMLAProvider:
    """Attends by FlashMLA, if its library was given or is installed."""

    name = "flashmla"
    checks_lse = False
    schedule_attends = True

    def __init__(self, file: Path | None = None) -> None:
        self.library = flashmla_library("--flashmla", file)

    def missing(self) -> list[str]:
        """Ask the library."""
        return self.library.missing()

    def problems(self, need: Requirements) -> list[str]:
        """List what it can't serve; ragged queries are padded, see `note`."""
        shape = shape_problems(
            need, page_sizes=f"[{PAGE_SIZE}]", serves_page=need.page_size == PAGE_SIZE
        )
        return [*self.missing(), *shape]

    def note(self, case: VerifyCase) -> str | None:
        """Say how far a ragged batch was padded."""
        lens = [r.query_len for r in case.requests]
        total = max(lens) * len(lens)
        if total == sum(lens):
            return None
        return f"padded to {max(lens)} rows a request: {total} instead of {sum(lens)}"

    def plan(self, case: VerifyCase) -> FlashMLAPlan:
        """Lay the queries out and make the schedule by a first call."""
        part = make_verify_part(
            case.requests,
            case.spec.mask,
            page_size=case.spec.page_size,
            device=case.spec.device,
            unused_cell=0,
        )
        query, real_rows = _padded(case)
        plan = FlashMLAPlan(query, part.seq_lens, part.block_table, real_rows)
        _, _, schedule = self._call(case, case.latent_cache, plan)
        return dataclasses.replace(plan, schedule=schedule)

    def schedule(self, case: VerifyCase, plan: FlashMLAPlan) -> None:
        """Make the schedule again; the library only does so together with a call."""
        fresh = dataclasses.replace(plan, schedule=None)
        self._call(case, case.latent_cache, fresh)

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: FlashMLAPlan) -> AttentionOutput:
        """Attend: out [B, Q, H, C] and LSE [B, H, Q], padding included."""
        out, lse, _ = self._call(case, latent_cache, plan)
        return AttentionOutput(out, lse)

    def result(self, got: AttentionOutput, plan: FlashMLAPlan) -> AttentionOutput:
        """Pack the real rows: out [T, H, C], LSE [T, H]."""
        batch, longest, heads, _ = plan.query.shape
        out = got.out.flatten(0, 1)
        lse = lse_or_nan(got.lse, (batch, heads, longest)).transpose(1, 2).flatten(0, 1)
        if plan.real_rows is None:
            return AttentionOutput(out, lse)
        return AttentionOutput(out[plan.real_rows], lse[plan.real_rows])

    def _call(
        self, case: VerifyCase, cache: Tensor, plan: FlashMLAPlan
    ) -> tuple[Tensor, Tensor, Schedule]:
        return dense_decode(
            self.library.operator(OPERATOR),
            plan.query,
            cache,
            (plan.seq_lens, plan.block_table),
            softmax_scale=case.softmax_scale,
            causal=case.spec.mask is DraftMask.CAUSAL,
            rank=case.spec.kv_lora_rank,
            schedule=plan.schedule,
        )


def _padded(case: VerifyCase) -> tuple[Tensor, Tensor | None]:
    """Give queries [B, Q, H, A] and where the packed rows lie in them (None: everywhere)."""
    packed = torch.cat([case.q_latent, case.q_rope], dim=-1)
    lens = [r.query_len for r in case.requests]
    longest = max(lens)
    shape = (len(lens), longest, *packed.shape[1:])
    if sum(lens) == len(lens) * longest:
        return packed.view(shape), None
    places = [(i + 1) * longest - n + row for i, n in enumerate(lens) for row in range(n)]
    real_rows = torch.tensor(places, dtype=torch.int64, device=packed.device)
    query = packed.new_zeros(len(lens) * longest, *packed.shape[1:])
    query[real_rows] = packed
    return query.view(shape), real_rows
