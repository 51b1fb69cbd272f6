"""The requests of a step by name, from `add` until they finish or are removed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from numbers import Integral

from specmla.errors import ArgumentError, require
from specmla.verify.pending import most_nodes, name_problems
from specmla.verify.processors.constraint import TokenConstraint
from specmla.verify.proposal import DraftRequest
from specmla.verify.requests import RequestState
from specmla.verify.sampling import SamplingParams


class RequestTable:
    """Request states in order of arrival.

    Args:
        vocab_size: W of the target.
        max_seq_len: context limit in tokens.
    """

    def __init__(self, vocab_size: int, max_seq_len: int) -> None:
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self._states: dict[Hashable, RequestState] = {}

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._states)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._states

    def __getitem__(self, request_id: Hashable) -> RequestState:
        """Find a request.

        Raises:
            ArgumentError: an unknown name.
        """
        try:
            return self._states[request_id]
        except (KeyError, TypeError):  # a name that can't be hashed is none
            raise ArgumentError(
                f"request_id {request_id!r} is unknown; active are {list(self._states)[:16]}"
            ) from None

    def __delitem__(self, request_id: Hashable) -> None:
        del self._states[request_id]

    def make(
        self,
        request_id: Hashable,
        tokens: Sequence[int],
        sampling: SamplingParams,
        constraint: TokenConstraint | None = None,
        output: Sequence[int] = (),
    ) -> RequestState:
        """Check a new request; it is on the table only after `put`.

        Raises:
            ArgumentError: a name in use or not hashable, tokens that can't be served.
            ArgumentTypeError: tokens or parameters of another type.
        """
        require(name_problems("request_id", (request_id,)), "VerifyStep.add")
        if request_id in self._states:
            raise ArgumentError(f"request_id {request_id!r} is in use; accepted is a new name")
        return RequestState(
            request_id,
            tokens,
            sampling,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            constraint=constraint,
            output=output,
        )

    def put(self, state: RequestState) -> None:
        """Take a checked request in."""
        self._states[state.request_id] = state

    def draft_requests(
        self,
        num_drafts: int | Mapping[Hashable, int],
        request_ids: Sequence[Hashable],
        cached: Callable[[Hashable], int],
    ) -> list[DraftRequest]:
        """Give the requests that have one pending token, the anchor, with their limits.

        Args:
            num_drafts: wanted drafts, for all requests or by request (absent: 0).
            request_ids: requests to look at.
            cached: tokens of a request that have a row in the cache.

        Raises:
            ArgumentError: unknown names, counts that are no integers of 0 or more.
        """
        wanted = []
        for request_id in request_ids:
            state = self[request_id]
            given = num_drafts.get(request_id, 0) if isinstance(num_drafts, Mapping) else num_drafts
            if not isinstance(given, int | Integral) or given < 0:
                raise ArgumentError(
                    f"num_drafts is {given!r} for {request_id!r}, accepted are integers >= 0"
                )
            if len(state.tokens) - cached(request_id) != 1:  # a prompt, or part of one
                continue
            count = min(int(given), state.draft_limit)
            nodes = min(int(given), most_nodes(state, self.max_seq_len))
            wanted.append(DraftRequest(request_id, state.tokens, count, state.sampling, nodes))
        return wanted
