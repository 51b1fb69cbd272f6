"""What requests bring to a captured proposal, in one bucket's buffers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.capture import CapturedMetadata
from specmla.errors import require
from specmla.metadata import RequestRows


class PendingRows(NamedTuple):
    """What one request brings to a proposal.

    Attributes:
        rows: verify rows that the network has not seen; their pages hold all later rounds too.
        tokens: of these rows.
        num_drafts: to be drafted, 1 or more; all but the last one get a row.
        anchor: position of the last committed token, the key of the random numbers.
    """

    rows: RequestRows
    tokens: Sequence[int]
    num_drafts: int
    anchor: int


class HeldChains:
    """Buffers of B requests of at most P rows each.

    Args:
        builder: of the drafter's cache and backend.
        bucket: B and P.
        states: a tensor of the width and dtype of the rows' states, None without.
        windows: requests may have a window start.
    """

    def __init__(
        self, builder: MetadataBuilder, bucket: Bucket, states: Tensor | None, windows: bool
    ) -> None:
        sizes = dict.fromkeys(("last", "anchors", "counts"), bucket.num_requests)
        sizes |= {"tokens": bucket.num_rows}
        sizes |= {} if states is None else {"places": bucket.num_rows}
        self.first = CapturedMetadata(builder, bucket, sizes, windows=windows)
        self.rounds = self.first.rounds()
        self.states = None
        if states is not None:
            self.states = states.new_zeros(bucket.num_rows, states.shape[-1])

    @property
    def anchors(self) -> Tensor:
        """Positions of the anchors [B]."""
        return self.first.along["anchors"]

    @property
    def counts(self) -> Tensor:
        """Drafts of each request [B]."""
        return self.first.along["counts"]

    def fill(self, pending: Sequence[PendingRows], states: Tensor | None) -> None:
        """Write what requests bring; see `CapturedChains.draft`."""
        bucket, blank = self.first.bucket, array("q", [0])
        found = bucket.problems([p.rows.query_len for p in pending])
        require(found, "CapturedChains.draft")
        lens = [p.rows.query_len for p in pending]
        missing = blank * (bucket.num_requests - len(pending))
        starts = range(0, bucket.num_rows, bucket.query_len)
        along = {
            "tokens": bucket.spread(array("q", [t for p in pending for t in p.tokens]), lens, 0),
            "last": array("q", [s + n - 1 for s, n in zip(starts, lens, strict=False)]) + missing,
            "anchors": array("q", [p.anchor for p in pending]) + missing,
            "counts": array("q", [p.num_drafts for p in pending]) + missing,
        }
        if self.states is not None:
            places = [s + i for s, n in zip(starts, lens, strict=False) for i in range(n)]
            along["places"] = array("q", places) + blank * (bucket.num_rows - len(places))
        self.first.for_replay([p.rows for p in pending], along, [p.num_drafts - 1 for p in pending])
        if self.states is not None and states is not None:
            places_sent = self.first.along["places"][: len(states)]
            self.states.index_copy_(0, places_sent, states.to(self.states.dtype))
