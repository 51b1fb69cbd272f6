"""Lays an overlapped step out: in new tensors, or wherever a `LateLayout` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specmla.builder import MetadataBuilder
from specmla.metadata import RequestRows
from specmla.verify.overlap_device import Settler
from specmla.verify.overlap_flights import Flight
from specmla.verify.overlap_plan import LateRequest, late_arrays
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch

LayOutLate = Callable[[Sequence[RequestRows]], StepPlan]
"""Puts a step whose pages are reserved into tensors."""


class LateLayout(Protocol):
    """Where an overlapped step may be laid out other than in new tensors."""

    def choose(
        self,
        late: Sequence[LateRequest],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
        flight: Flight | None,
    ) -> LayOutLate | None:
        """Find a place for a step before anything is reserved for it; None: new tensors.

        Args:
            late: requests of the step.
            proposal: its drafts.
            sampling: parameters of the requests.
            flight: the step under way.

        Raises:
            ArgumentError: there is none; all reasons are listed.
        """
        ...


def lay_out_late(
    builder: MetadataBuilder,
    settle: Settler,
    late: Sequence[LateRequest],
    rows: Sequence[RequestRows],
    proposal: DraftProposal | None,
    sampling: SamplingBatch,
) -> StepPlan:
    """Lay out a step in new tensors.

    Args:
        builder: makes the metadata.
        settle: makes bounds exact.
        late: requests of the step. rows: what they bring, by bounds.
        proposal: drafts for some of them, and maybe for others.
        sampling: parameters of the requests.
    """
    metadata = builder.build(rows, along=late_arrays(late), settle=settle)
    sent, count = metadata.along, len(late)
    drafted = settle.place_drafts(sent, proposal, count)
    return StepPlan(
        requests=tuple(r.planned for r in late),
        metadata=metadata,
        token_ids=drafted.token_ids,
        logit_rows=sent["logit_rows"],
        row_table=sent["row_table"].view(count, -1),
        drafts=drafted.drafts,
        draft_probs=drafted.draft_probs,
        positions=sent["positions"],
        sampling=sampling,
    )
