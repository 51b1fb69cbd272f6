"""The requests that a step holds between plans: who they are, how they come, fork and go."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from specmla.cache.blocks import BlockManager
from specmla.errors import ArgumentError
from specmla.verify.plan import PlannedRequest, StepPlan
from specmla.verify.processors.constraint import TokenConstraint
from specmla.verify.proposal import DraftRequest
from specmla.verify.sampling import SamplingParams
from specmla.verify.table import RequestTable


class RequestRoster:
    """Registers requests, forks and drops them, and gives back what a cancelled plan reserved.

    Args:
        blocks: the pages that requests own.
        vocab_size: W of the target.
        max_seq_len: context limit in tokens, emitted ones included.
    """

    def __init__(self, blocks: BlockManager, vocab_size: int, max_seq_len: int) -> None:
        self.blocks, self.vocab_size, self.max_seq_len = blocks, vocab_size, max_seq_len
        self._table = RequestTable(vocab_size, max_seq_len)
        self._open: StepPlan | None = None
        self._is_overlapped = False  # `_open` stands for the steps of an `OverlappedStep`

    @property
    def active(self) -> tuple[Hashable, ...]:
        """Requests that have not finished, in order of arrival."""
        return tuple(self._table)

    def tokens(self, request_id: Hashable) -> Sequence[int]:
        """Committed tokens of a request, prompt first (read-only)."""
        return self._table[request_id].tokens

    def add(
        self,
        request_id: Hashable,
        prompt: Sequence[int],
        sampling: SamplingParams,
        constraint: TokenConstraint | None = None,
        output: Sequence[int] = (),
    ) -> int:
        """Register a request; give the number of prompt tokens found in the prefix cache.

        Args:
            request_id: a new name.
            prompt: its tokens.
            sampling: how its tokens are chosen and when it ends.
            constraint: says which tokens may follow (a grammar); it hears of emitted tokens only.
            output: of a request that was preempted, what it had emitted: limits and penalties go
                on from there, and with its seed so do its draws. `constraint` knows of it.

        Raises:
            ArgumentError: a name in use or not hashable, an empty or too long prompt, ids outside
                the vocabulary, an output that leaves nothing of `max_tokens`.
            ArgumentTypeError: a prompt or output that is no sequence of integers.
        """
        state = self._table.make(request_id, prompt, sampling, constraint, output)
        matched = self.blocks.add(request_id, state.tokens)
        self._table.put(state)
        return matched

    def fork(
        self,
        parent_id: Hashable,
        child_id: Hashable,
        sampling: SamplingParams,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """Go on from a request in a second way; its pages are shared until one is written.

        All tokens of the parent are the child's prompt: `max_tokens`, `min_tokens` and the
        penalties of the output start anew. `constraint` is one that knows of them.

        Raises:
            ArgumentError: an unknown parent, or one in the planned step; a child's name in use.
        """
        parent = self._table[parent_id]
        self._refuse_planned(parent_id)
        state = self._table.make(child_id, parent.tokens, sampling, constraint)
        self.blocks.fork(parent_id, child_id)
        self._table.put(state)

    def remove(self, request_id: Hashable) -> None:
        """Drop a request (finished ones leave by themselves) and give its pages back."""
        self._table[request_id]
        self._refuse_planned(request_id)
        self.blocks.free(request_id)
        del self._table[request_id]

    def drop(self, request_ids: Iterable[Hashable]) -> None:
        """Forget requests, whatever happens to them; a planned step that holds one is cancelled.

        Names that are not active are ignored: this is the clean-up after an error.

        Raises:
            ArgumentError: steps of an `OverlappedStep` hold one: drop them there.
        """
        names = [name for name in dict.fromkeys(request_ids) if name in self._table]
        planned = set() if self._open is None else {r.request_id for r in self._open.requests}
        held = [name for name in names if name in planned]
        if held and self._is_overlapped:
            raise ArgumentError(
                f"requests {held[:8]} are part of steps of an OverlappedStep; drop them there"
            )
        if held and self._open is not None:
            self.cancel(self._open)
        for name in names:
            self.remove(name)

    def draft_requests(
        self,
        num_drafts: int | Mapping[Hashable, int],
        request_ids: Iterable[Hashable] | None = None,
    ) -> list[DraftRequest]:
        """Give what a drafter may draft for: requests whose prompt is computed, with their limits.

        Args:
            num_drafts: wanted drafts, for all requests or by request (absent: 0).
            request_ids: all active ones if None.

        Raises:
            ArgumentError: unknown names, counts that are no integers of 0 or more.
        """
        names = list(self._table if request_ids is None else request_ids)
        return self._table.draft_requests(num_drafts, names, self.blocks.length)

    def cancel(self, plan: StepPlan) -> None:
        """Give back what a planned step reserved; lengths stay as they were."""
        self.check_open(plan)
        self._open = None
        self._release(plan.requests)

    def check_open(self, plan: StepPlan) -> None:
        """Refuse all but the planned step: the pages of any other may be another request's by now.

        Raises:
            ArgumentError: a plan that was committed or cancelled, or is of another step.
        """
        if plan is None or plan is not self._open:
            why = "no step is open" if self._open is None else "another one is open"
            raise ArgumentError(
                f"plan is not the step planned last, or was committed or cancelled: {why}"
            )

    def _refuse_planned(self, request_id: Hashable) -> None:
        if self._open is not None and request_id in {r.request_id for r in self._open.requests}:
            raise ArgumentError(
                f"request_id {request_id!r} is part of the planned step; commit or cancel it first"
            )

    def _release(self, planned: Iterable[PlannedRequest]) -> None:
        for r in planned:
            self.blocks.roll_back(r.request_id, self.blocks.length(r.request_id))
