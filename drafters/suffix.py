"""Suffix decoding (Oliaro et al., arXiv:2411.04975): propose what followed the last tokens before,
in the request itself or in what other requests emitted, as a chain or as a tree.

For every number of last tokens that was seen before, candidates follow the counts: a child's chance
is its share of the places after its parent. The number of candidates grows with the match, and they
end where the chance falls below `min_token_prob`. The match whose candidates have the largest sum
of chances, the expected number of accepted ones if the counts were right, is proposed. Nothing is
sampled: the draft distribution is one-hot on each token.

Outputs of other requests change what is drafted, never the distribution of what is emitted. Of a
sampled request they change the tokens (those of sample-match apart), unless `max_cached_tokens` is
0: a seed alone does not fix them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from drafters.gqa_config import count_problems
from drafters.suffix_index import SuffixIndex
from specmla import ArgumentError, DraftProposal

if TYPE_CHECKING:
    from specmla import DraftRequest, HiddenRows, RequestResult


class _Candidates(NamedTuple):
    """Tokens, the place of each one's parent (-1 for the anchor) and the sum of their chances."""

    tokens: list[int]
    parents: list[int]
    score: float


class SuffixDrafter:
    """Proposes by suffixes of the request and of finished outputs.

    Args:
        vocab_size: W of the target.
        tree: propose trees, of `DraftRequest.num_nodes` nodes at most, rather than chains.
        longest_match: most last tokens that are looked for.
        max_spec_factor, max_spec_offset: at most factor * match + offset tokens are proposed.
        min_token_prob: least chance of a proposed token, by the counts.
        max_cached_tokens: of finished outputs that are kept for other requests, oldest dropped
            first; about 0.4 KB each. 0 keeps none.

    Raises:
        ArgumentError: lists every argument out of its range.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        tree: bool = False,
        longest_match: int = 24,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = 200_000,
    ) -> None:
        given = {"vocab_size": vocab_size, "longest_match": longest_match}
        given["max_cached_tokens"] = max_cached_tokens
        found = count_problems({"vocab_size": 1, "longest_match": 1, "max_cached_tokens": 0}, given)
        numbers = all(math.isfinite(n) for n in (max_spec_factor, max_spec_offset))
        if not numbers or not max_spec_factor >= 0 or not max_spec_factor + max_spec_offset >= 0:
            found.append(
                f"max_spec_factor is {max_spec_factor} and max_spec_offset {max_spec_offset}; "
                "accepted is a finite factor >= 0, and 0 or more tokens for a match of 1"
            )
        if not 0 < min_token_prob <= 1:
            found.append(f"min_token_prob is {min_token_prob}, accepted is above 0 and at most 1")
        if found:
            raise ArgumentError("SuffixDrafter: " + "; ".join(found))
        self.vocab_size, self.tree, self.longest_match = vocab_size, tree, longest_match
        self.drafts_trees = tree  # steps for trees are worth capturing
        self.drafts_ahead = not tree  # a chain goes on as far as asked; of a tree nobody could say
        self.max_spec_factor, self.max_spec_offset = max_spec_factor, max_spec_offset
        self.min_token_prob, self.max_cached_tokens = min_token_prob, max_cached_tokens
        self._outputs = SuffixIndex(max_tokens=max_cached_tokens)
        self._own: dict[Hashable, tuple[SuffixIndex, int]] = {}  # with the prompt's length

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Propose what the best match says; a request without a match gets nothing."""
        found = [self._best(r) for r in requests]
        width = max((len(c.tokens) for c in found), default=0)
        padded = [c.tokens + [-1] * (width - len(c.tokens)) for c in found]
        return DraftProposal(
            request_ids=tuple(r.request_id for r in requests),
            counts=tuple(len(c.tokens) for c in found),
            tokens=torch.tensor(padded, dtype=torch.int64).view(len(found), width),
            parents=tuple(c.parents for c in found) if self.tree else None,
        )

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Index what was emitted for requests that were drafted for."""
        for result in results:
            if result.request_id in self._own:
                self._own[result.request_id][0].extend(result.new_tokens)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request; its output, led by the end of its prompt, serves other requests."""
        own, num_prompt = self._own.pop(request_id, (None, 0))
        if own is None or not self.max_cached_tokens:
            return
        first = max(0, num_prompt - self.longest_match)
        self._outputs.extend(own.text(first)[-self.max_cached_tokens :])
        self._outputs.close()

    def _best(self, r: DraftRequest) -> _Candidates:
        """Find the candidates of the largest score; among equal ones those of the longest match."""
        if r.request_id not in self._own:  # all but the last token are its prompt
            self._own[r.request_id] = SuffixIndex(), len(r.tokens) - 1
        own, _ = self._own[r.request_id]
        own.extend(r.tokens[len(own) :])
        context = own.text(-self.longest_match)
        best, length = _Candidates([], [], 0.0), 0
        for index in (own, self._outputs):
            for match, places in index.matches(context, self.longest_match):
                most = int(match * self.max_spec_factor + self.max_spec_offset)
                found = self._expand(index, places, most, r)
                if (found.score, match) > (best.score, length):
                    best, length = found, match
        return best

    def _expand(
        self, index: SuffixIndex, places: list[int], most: int, r: DraftRequest
    ) -> _Candidates:
        """Take the likeliest nodes below a match: of a tree all, of a chain one a level."""
        budget = min(most, (r.num_nodes or r.num_drafts) if self.tree else r.num_drafts)
        tokens: list[int] = []
        parents: list[int] = []
        score, order = 0.0, 0  # `order` breaks ties in favour of what was found first
        heap = [(-1.0, order, -1, 0, -1, places)]
        while heap and len(tokens) < budget:
            chance, _, parent, depth, token, at = heapq.heappop(heap)
            if depth:
                tokens.append(token)
                parents.append(parent)
                score -= chance
            if depth == r.num_drafts:
                continue
            groups = index.children(at).items()
            likely = groups if self.tree else sorted(groups, key=lambda g: -len(g[1]))[:1]
            for child, after in likely:
                order += 1
                part = chance * len(after) / len(at)
                if -part >= self.min_token_prob:
                    heapq.heappush(heap, (part, order, len(tokens) - 1, depth + 1, child, after))
        return _Candidates(tokens, parents, score)
