"""Which rows each request brings to the next step: its pending tokens, then its drafts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from specmla.errors import ArgumentTypeError
from specmla.metadata import RequestKind, RequestRows
from specmla.verify.plan import PlannedRequest
from specmla.verify.proposal import DraftProposal
from specmla.verify.requests import RequestState
from specmla.verify.tree import MAX_DRAFT_NODES, keep_nodes

_PROMPT, _VERIFY = RequestKind.PROMPT, RequestKind.VERIFY  # looking up a member takes its time


def batch_problems(names: Sequence[Hashable], proposal: DraftProposal | None) -> list[str]:
    """List what is wrong with a step's names and its proposal as a whole.

    Raises:
        ArgumentTypeError: a proposal of another type.
    """
    if not isinstance(proposal, DraftProposal | None):
        raise ArgumentTypeError(
            f"proposal is a {type(proposal).__name__}, accepted are DraftProposal and None"
        )
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


def plan_requests(
    states: Sequence[RequestState],
    cached: Callable[[Hashable], int],
    proposal: DraftProposal | None,
    max_seq_len: int,
) -> list[PlannedRequest]:
    """Plan the requests of a step, those that verify before prompts, as metadata orders them.

    Several pending tokens are a prompt, one is an anchor to verify drafts from.

    Args:
        states: requests of the step.
        cached: tokens of a request that have a row in the cache.
        proposal: drafts for some of them, and maybe for others.
        max_seq_len: context limit in tokens, which all rows of a tree must keep to.
    """
    verifies, prompts = [], []
    for state, (count, offset, parents) in zip(states, _drafts_of(states, proposal), strict=True):
        tokens, name = state.tokens, state.request_id
        position = len(tokens) - 1
        pending, tree = tokens[cached(name) :], None
        if len(pending) > 1:
            prompts.append(PlannedRequest(state, name, pending, position, 0, offset, True))
            continue
        if parents is not None:
            kept = keep_nodes(parents, most_nodes(state, max_seq_len), state.draft_limit)
            count, tree = len(kept.nodes), None if kept.is_chain else kept
        elif count:
            count = min(count, state.draft_limit)
        verifies.append(PlannedRequest(state, name, pending, position, count, offset, False, tree))
    return verifies + prompts


def most_nodes(state: RequestState, max_seq_len: int) -> int:
    """Give the most nodes of a tree: rows that fit a mask's word and the context."""
    return min(MAX_DRAFT_NODES, max_seq_len - len(state.tokens))


def _drafts_of(
    states: Sequence[RequestState], proposal: DraftProposal | None
) -> Iterable[tuple[int, int, Sequence[int] | None]]:
    """Give each request's draft count, where its drafts start in the flattened tokens, and the
    parents of a tree."""
    none = (0, 0, None)
    if proposal is None:
        return [none] * len(states)
    width = proposal.tokens.shape[1]
    starts = [i * width for i in range(len(proposal.counts))]
    given = zip(proposal.counts, starts, proposal.parents or [None] * len(starts), strict=True)
    drafts = dict(zip(proposal.request_ids, given, strict=True))
    return [drafts.get(state.request_id, none) for state in states]


def new_rows(r: PlannedRequest, block_ids: Sequence[int]) -> RequestRows:
    """Say what the metadata builder needs of a planned request."""
    _, _, pending, position, num_drafts, _, is_prompt, tree = r
    kind = _PROMPT if is_prompt else _VERIFY
    parents = None if tree is None else tree.row_parents
    return RequestRows(
        kind, len(pending) + num_drafts, position + 1 + num_drafts, block_ids, parents
    )
