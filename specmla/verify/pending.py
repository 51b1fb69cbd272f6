"""Which rows each request brings to the next step: its pending tokens, then its drafts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from specmla.metadata import RequestKind, RequestRows
from specmla.verify.plan import PlannedRequest
from specmla.verify.proposal import DraftProposal
from specmla.verify.requests import RequestState


def batch_problems(names: Sequence[Hashable], proposal: DraftProposal | None) -> list[str]:
    """List what is wrong with a step's names and its proposal as a whole."""
    found = []
    if not names:
        found.append("request_ids is empty, accepted is at least one active request")
    found += name_problems("request_ids", names)
    if proposal is not None:
        found += name_problems("proposal.request_ids", proposal.request_ids)
    return found


def name_problems(label: str, names: Sequence[Hashable]) -> list[str]:
    """List why `names` can't name requests: not hashable, or not distinct."""
    try:
        distinct = set(names)
    except TypeError as error:
        return [f"{label} is {list(names)}, accepted are hashable names: {error}"]
    return [f"{label} {list(names)} holds a name twice"] if len(distinct) < len(names) else []


def pair_drafts(
    names: Sequence[Hashable], proposal: DraftProposal | None
) -> Iterator[tuple[Hashable, tuple[int, int]]]:
    """Give each name its draft count and where its drafts start in the flattened tokens."""
    drafts: dict[Hashable, tuple[int, int]] = {}
    if proposal is not None:
        width = proposal.tokens.shape[1]
        for i, name in enumerate(proposal.request_ids):
            drafts[name] = (proposal.counts[i], i * width)
    for name in names:
        yield name, drafts.get(name, (0, 0))


def plan_request(state: RequestState, cached: int, count: int, offset: int) -> PlannedRequest:
    """Plan one request: several pending tokens are a prompt, one is an anchor to verify from."""
    pending = state.tokens[cached:]
    is_prompt = len(pending) > 1
    return PlannedRequest(
        request_id=state.request_id,
        pending=pending,
        position=len(state.tokens) - 1,
        num_drafts=0 if is_prompt else min(count, state.draft_limit),
        proposal_offset=offset,
        is_prompt=is_prompt,
    )


def new_rows(r: PlannedRequest, block_ids: Sequence[int]) -> RequestRows:
    """Say what the metadata builder needs of a planned request."""
    return RequestRows(
        kind=RequestKind.PROMPT if r.is_prompt else RequestKind.VERIFY,
        query_len=len(r.pending) + r.num_drafts,
        seq_len=r.position + 1 + r.num_drafts,
        block_ids=block_ids,
    )
