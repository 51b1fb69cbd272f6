"""What a drafter on hidden states holds of each request between steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specmla import HiddenRows, RequestResult

_FEW = 64


@dataclass
class KnownStates:
    """The run of positions of a request whose target states are known.

    Attributes:
        first: its first position; above 0 where a prefix was found in the target's cache.
        stored: the first position that the drafter's cache has no true row of.
        end: the first position after the run.
        pending: states [., F] of `stored` .. `end` - 1.
        last: [., F], whose last row is that of the row before `stored`, if there was one.
    """

    first: int
    stored: int
    end: int
    pending: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None

    @property
    def num_pending(self) -> int:
        """Rows that are not stored yet."""
        return self.end - self.stored

    @property
    def num_known(self) -> int:
        """Rows of the run."""
        return self.end - self.first


class StateLog:
    """Collects states by request until the drafter takes them into its cache."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, KnownStates] = {}

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._runs

    def __getitem__(self, request_id: Hashable) -> KnownStates:
        return self._runs[request_id]

    def is_ready(self, request_id: Hashable, tokens: Sequence[int]) -> bool:
        """Tell whether the states of all rows before the anchor's are known, from some row on."""
        run = self._runs.get(request_id)
        return run is not None and run.end == len(tokens) - 1 and run.end > run.first

    def observe(
        self, results: Sequence[RequestResult], hidden: HiddenRows | None
    ) -> list[Hashable]:
        """Append the states of a step; name the requests whose run began anew.

        That is where rows were committed that this log heard nothing of: what is cached of the
        request does not continue.
        """
        if hidden is None:
            return []
        restarted = []
        parts = hidden.states.split(list(hidden.counts))
        for result, start, count, states in zip(
            results, hidden.starts, hidden.counts, parts, strict=True
        ):
            run = self._runs.get(result.request_id)
            if run is None or run.end != start:
                if run is not None:
                    restarted.append(result.request_id)
                run = self._runs[result.request_id] = KnownStates(start, start, start)
            run.end = start + count
            if count:
                run.pending.append(states)
        return restarted

    def renew(self, request_ids: Iterable[Hashable]) -> None:
        """Let the last row be run again where nothing is pending: its step came to nothing."""
        for request_id in request_ids:
            run = self._runs[request_id]
            if not run.pending and run.last is not None:
                run.pending, run.stored = [run.last[-1:]], run.end - 1

    def take(self, request_ids: Iterable[Hashable]) -> Tensor:
        """Give the pending states [R, F] of requests, one after the other, as stored from now."""
        taken: list[Tensor] = []
        for request_id in request_ids:
            run = self._runs[request_id]
            taken += run.pending
            newest = run.pending[-1]
            # A view would keep all states of a prompt; a slice of a few rows takes time.
            run.last = newest if newest.shape[0] <= _FEW else newest[-1:].clone()
            run.pending, run.stored = [], run.end
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    @contextmanager
    def undone_by_errors(self, request_ids: Iterable[Hashable]) -> Iterator[None]:
        """Hold these requests' states again if what takes them inside fails."""
        runs = [self._runs[name] for name in request_ids]
        held = [(run.stored, run.pending, run.last) for run in runs]  # `take` makes a new list
        try:
            yield
        except BaseException:
            for run, state in zip(runs, held, strict=True):
                run.stored, run.pending, run.last = state
            raise

    def forget(self, request_id: Hashable) -> bool:
        """Drop a request; tell whether it was known."""
        return self._runs.pop(request_id, None) is not None
