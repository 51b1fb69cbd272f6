"""Plans a step before the last verdict has arrived: who takes part, and within what bounds.

Of a request whose last step is under way the host knows the tokens before that step, and that it
emits 1 to K + 1 more. What is planned are bounds; `specmla.verify.overlap_device` makes them exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

from specmla.metadata import RequestKind, RequestRows
from specmla.verify.overlap_flights import Flight
from specmla.verify.pending import batch_problems
from specmla.verify.plan import PlannedRequest, host_arrays
from specmla.verify.proposal import DraftProposal, DraftRequest
from specmla.verify.requests import RequestState
from specmla.verify.table import RequestTable


class DraftsAhead(NamedTuple):
    """Chains that continue the committed tokens, from who does not know what comes after them.

    Of a request whose last step is under way the device skips as many drafts as that step emits.
    The drafts are functions of committed tokens: their distribution is one-hot. They lose nothing,
    but where what was emitted is not what they said, fewer of them stand.

    Attributes:
        proposal: without `probs` and `parents`; long enough for both steps if made for
            `OverlappedStep.draft_requests(num_drafts, ahead=True)`.
        num_drafts: most drafts to verify of each request, for all or by name (absent: 0).
    """

    proposal: DraftProposal
    num_drafts: int | Mapping[Hashable, int]

    def most(self, request_id: Hashable) -> int:
        """Give the most drafts to verify of a request."""
        given = self.num_drafts
        return int(given.get(request_id, 0) if isinstance(given, Mapping) else given)

    def problems(self) -> list[str]:
        """List why these can't be drafts ahead."""
        given = self.num_drafts
        numbers = list(given.values()) if isinstance(given, Mapping) else [given]
        found = []
        if any(not isinstance(n, int | Integral) or n < 0 for n in numbers):
            found.append(f"num_drafts is {given!r}, accepted are integers >= 0")
        if self.proposal is None:  # what some drafters give who have nothing
            found.append("proposal is None, accepted is a DraftProposal, of no requests too")
        elif self.proposal.probs is not None:
            found.append(
                "drafts ahead come with probs, accepted is None: they are drawn after tokens that "
                "the step under way may not emit"
            )
        return found


Drafts = DraftProposal | DraftsAhead | None


class LateRequest(NamedTuple):
    """A request of the step to be planned.

    Attributes:
        planned: its bounds: `position` is the highest that the anchor may have.
        source: its row in the verdict under way, -1 if the host knows all of it.
        behind: by how much the position may be lower.
        end: end of the cache rows that it may write.
        first_draft, end_draft: its cells of the proposal's flattened tokens.
        skips: of those the device skips the tokens that the step under way emits.
    """

    planned: PlannedRequest
    source: int
    behind: int
    end: int
    first_draft: int
    end_draft: int
    skips: bool

    def rows(self, block_ids: Sequence[int]) -> RequestRows:
        """Say what the metadata builder needs: an upper bound of the length."""
        r = self.planned
        kind = RequestKind.PROMPT if r.is_prompt else RequestKind.VERIFY
        return RequestRows(kind, len(r.pending) + r.num_drafts, self.end, block_ids)


def late_problems(
    names: Sequence[Hashable], states: Sequence[RequestState], flight: Flight | None, drafts: Drafts
) -> list[str]:
    """List why these requests and drafts can't be planned before the last verdict has arrived."""
    proposal = drafts.proposal if isinstance(drafts, DraftsAhead) else drafts
    found = batch_problems(names, proposal)
    if isinstance(drafts, DraftsAhead):
        found += drafts.problems()
    if proposal is not None and any(p is not None for p in proposal.parents or ()):
        found.append("the proposal has trees, accepted are chains: where a tree ends is not known")
    bound = [s.request_id for s in states if s.constraint is not None]
    if bound:
        found.append(
            f"requests {bound[:8]} have a constraint, which needs every token on the host, "
            "accepted are requests without (or `VerifyStep`)"
        )
    ending = [s.request_id for s in states if ends_under_way(s, flight)]
    if ending:
        found.append(f"requests {ending[:8]} end with the step under way, at their limit")
    return found


def ends_under_way(state: RequestState, flight: Flight | None) -> bool:
    """Tell whether the step under way takes a request to its limit, whatever it emits."""
    return flight is not None and state in flight.places and state.budget <= 1


def most_drafts(state: RequestState, flight: Flight | None) -> int:
    """Give the most drafts worth verifying if the step under way emits one token only."""
    return max(0, state.draft_limit - (flight is not None and state in flight.places))


def late_draft_requests(
    table: RequestTable,
    names: Sequence[Hashable],
    num_drafts: int | Mapping[Hashable, int],
    cached: Callable[[Hashable], int],
    flight: Flight | None,
    *,
    ahead: bool,
) -> list[DraftRequest]:
    """Give the requests that will have one pending token, with their limits; see
    `OverlappedStep.draft_requests`."""
    bounds = {n: None if flight is None else flight.bound(table[n]) for n in names}

    def known(name: Hashable) -> int:
        return cached(name) if bounds[name] is None else len(table[name].tokens) - 1

    found = []
    for request in table.draft_requests(num_drafts, names, known):
        bound = bounds[request.request_id]
        if bound is not None:
            count = min(request.num_drafts, most_drafts(table[request.request_id], flight))
            count += (bound + 1) * ahead
            request = request._replace(num_drafts=count, num_nodes=count)
        found.append(request)
    return found


def plan_late(
    states: Sequence[RequestState],
    cached: Callable[[Hashable], int],
    flight: Flight | None,
    drafts: Drafts,
) -> list[LateRequest]:
    """Plan the requests of a step, those that verify before prompts, as metadata orders them.

    Args:
        states: requests of the step.
        cached: tokens of a request that have a row in the cache.
        flight: the step under way.
        drafts: for some of them, and maybe for others.
    """
    cells = _cells(drafts)
    late = [_plan_one(state, cached, flight, drafts, cells) for state in states]
    return sorted(late, key=lambda r: r.planned.is_prompt)  # keeps the order otherwise


def _plan_one(
    state: RequestState,
    cached: Callable[[Hashable], int],
    flight: Flight | None,
    drafts: Drafts,
    cells: Mapping[Hashable, tuple[int, int]],
) -> LateRequest:
    name, behind = state.request_id, None if flight is None else flight.bound(state)
    first, end = cells.get(name, (0, 0))
    position, source = len(state.tokens) - 1, -1
    pending: Sequence[int] = array("q", [0])
    if behind is None:
        pending, behind = state.tokens[cached(name) :], 0
    elif flight is not None:
        source, position = flight.places[state], position + 1 + behind
    if len(pending) > 1:
        planned = PlannedRequest(state, name, pending, position, 0, first, True)
        return LateRequest(planned, source, behind, position + 1, first, end, False)
    count, skips = min(end - first, most_drafts(state, flight)), False
    if isinstance(drafts, DraftsAhead):
        skips = source >= 0
        count = max(0, min(count, end - first - skips, drafts.most(name)))
    planned = PlannedRequest(state, name, pending, position, count, first, False)
    # The last token that may be emitted never gets a row.
    last = min(position + 1 + count, state.limit - 1)
    return LateRequest(planned, source, behind, last, first, end, skips)


def _cells(drafts: Drafts) -> dict[Hashable, tuple[int, int]]:
    proposal = drafts.proposal if isinstance(drafts, DraftsAhead) else drafts
    if proposal is None:
        return {}
    width = proposal.tokens.shape[1]
    return {
        name: (i * width, i * width + count)
        for i, (name, count) in enumerate(zip(proposal.request_ids, proposal.counts, strict=True))
    }


def late_arrays(requests: Sequence[LateRequest]) -> dict[str, array[int]]:
    """Give what the device needs to make the bounds exact, to travel with the metadata."""
    given = host_arrays([r.planned for r in requests], None)
    verifies = [r for r in requests if not r.planned.is_prompt]
    lens = [1 + r.planned.num_drafts for r in verifies]
    return {
        "tokens": given["tokens"],
        "positions": given["positions"],
        "logit_rows": given["logit_rows"],
        "anchors": array("q", [r.planned.pending[0] for r in verifies]),
        "row_table": given["row_table"],
        "source": array("q", [r.source for r in verifies]),
        "behind": array("q", [r.behind for r in verifies]),
        "limit": array("q", [r.planned.state.limit for r in verifies]),
        "num_drafts": array("q", [r.planned.num_drafts for r in verifies]),
        "first_draft": array("q", [r.first_draft for r in verifies]),
        "end_draft": array("q", [r.end_draft for r in verifies]),
        "skips": array("q", [r.skips for r in verifies]),
        "row_request": array("q", [b for b, n in enumerate(lens) for _ in range(n)]),
        "row_place": array("q", [t for n in lens for t in range(n)]),
    }
