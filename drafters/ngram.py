"""N-gram (prompt look-up) drafting: propose what followed the same words earlier in the request.

Nothing is sampled and no model runs, so the draft distribution is one-hot on each token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from specmla import ArgumentError, DraftProposal

if TYPE_CHECKING:
    from specmla import DraftRequest, HiddenRows, RequestResult


class _Index:
    """Where each n-gram of a request was last followed by something."""

    __slots__ = ("ends", "size")

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.size = 0

    def grow(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        """Index n-grams that end before the last token: only those have a continuation."""
        for end in range(max(self.size, 1), len(tokens)):
            for n in range(shortest, min(longest, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.size = len(tokens)


class NgramDrafter:
    """Looks for the longest suffix of `prompt_lookup_max` down to `prompt_lookup_min` tokens that
    occurred before, latest occurrence first, and proposes what followed it.

    Args:
        vocab_size: W of the target.
        prompt_lookup_min: shortest suffix that counts as a match.
        prompt_lookup_max: longest suffix tried.

    Raises:
        ArgumentError: no integers of 1 or more, or a minimum above the maximum.
    """

    drafts_ahead = True

    def __init__(
        self, vocab_size: int, *, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5
    ) -> None:
        sizes = {"vocab_size": vocab_size, "prompt_lookup_min": prompt_lookup_min}
        sizes["prompt_lookup_max"] = prompt_lookup_max
        found = [
            f"{name} is {value!r}, accepted are integers >= 1"
            for name, value in sizes.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if not found and prompt_lookup_min > prompt_lookup_max:
            found.append(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max "
                f"{prompt_lookup_max}; accepted is 1 <= min <= max"
            )
        if found:
            raise ArgumentError("NgramDrafter: " + "; ".join(found))
        self.vocab_size = vocab_size
        self.shortest, self.longest = prompt_lookup_min, prompt_lookup_max
        self._indexes: dict[Hashable, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Propose up to `num_drafts` tokens each; a request without a match gets none."""
        drafts = [self._draft(r) for r in requests]
        width = max((len(d) for d in drafts), default=0)
        padded = [d + [-1] * (width - len(d)) for d in drafts]
        return DraftProposal(
            request_ids=tuple(r.request_id for r in requests),
            counts=tuple(len(d) for d in drafts),
            tokens=torch.tensor(padded, dtype=torch.int64).view(len(drafts), width),
        )

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Do nothing: the index grows from the committed tokens at the next proposal."""

    def reset(self, request_id: Hashable) -> None:
        """Forget a request."""
        self._indexes.pop(request_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        tokens = request.tokens
        index = self._indexes.setdefault(request.request_id, _Index())
        index.grow(tokens, self.shortest, self.longest)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            end = index.ends.get(tuple(tokens[len(tokens) - n :]))
            if end is not None:
                return list(tokens[end : end + request.num_drafts])
        return []
