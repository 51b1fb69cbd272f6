"""Reserves an overlapped step and lays it out: in new tensors, or where a `LateLayout` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specmla.builder import MetadataBuilder
from specmla.cache.copies import fill_copies
from specmla.metadata import RequestRows
from specmla.verify.overlap_device import Settler
from specmla.verify.overlap_flights import Flight, Flights
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


def reserve_late(flights: Flights, late: Sequence[LateRequest], lay: LayOutLate) -> StepPlan:
    """Reserve pages for every row that there may be, lay the step out and take it in.

    Raises:
        PoolFullError: too few pages; nothing was reserved.
    """
    cache, blocks = flights.step.cache, flights.step.blocks
    needs = {r.planned.request_id: r.end for r in late}
    copies = blocks.reserve({name: end - blocks.length(name) for name, end in needs.items()})
    try:
        fill_copies(cache, blocks, copies, list(needs))
        plan = lay([r.rows(blocks.block_ids(r.planned.request_id)) for r in late])
    except BaseException:
        flights.release(r.planned.state for r in late)
        raise
    flights.put(Flight.of(plan, [r.end for r in late]))
    return plan


def lay_out_late(
    builder: MetadataBuilder,
    settle: Settler,
    late: Sequence[LateRequest],
    proposal: DraftProposal | None,
    sampling: SamplingBatch,
    rows: Sequence[RequestRows],
) -> StepPlan:
    """Lay out a step in new tensors.

    Args:
        builder: makes the metadata.
        settle: makes bounds exact.
        late: requests of the step.
        proposal: drafts for some of them, and maybe for others.
        sampling: parameters of the requests.
        rows: what they bring, by bounds.
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
        late=settle.late_tokens(sent, count) if sampling.has_processors else None,
    )
