from __future__ import annotations

import pytest

from drafters import NgramDrafter
from specmla import ArgumentError, DraftRequest, SamplingParams


def propose(drafter: NgramDrafter, *requests: tuple[list[int], int]) -> list[list[int]]:
    batch = [DraftRequest(i, t, k, SamplingParams()) for i, (t, k) in enumerate(requests)]
    proposal = drafter.propose(batch)
    assert proposal.request_ids == tuple(range(len(batch)))
    assert proposal.probs is None
    rows = proposal.tokens.tolist()
    for row, count in zip(rows, proposal.counts, strict=True):
        assert all(t >= 0 for t in row[:count])
        assert all(t == -1 for t in row[count:])
    return [row[:count] for row, count in zip(rows, proposal.counts, strict=True)]


def brute_force(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    """The longest suffix first; of its earlier occurrences the latest that something follows."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix:
                return tokens[end : end + k]
    return []


def test_proposes_what_followed_the_latest_match():
    assert propose(NgramDrafter(10), ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 3)) == [[4, 8, 1]]


def test_longest_match_wins_over_a_later_shorter_one():
    assert propose(NgramDrafter(10), ([5, 1, 2, 7, 3, 1, 2, 8, 5, 1, 2], 2)) == [[7, 3]]


def test_requests_are_ragged_and_may_get_nothing():
    drafts = propose(NgramDrafter(10), ([1, 2, 3, 1, 2], 4), ([1, 2, 3], 4), ([1, 2, 3, 1, 2], 0))
    assert drafts == [[3, 1, 2], [], []]


def test_no_requests():
    assert propose(NgramDrafter(10)) == []


def test_index_that_grew_step_by_step_equals_brute_force():
    state, tokens = 12345, []
    drafter = NgramDrafter(3, prompt_lookup_min=1, prompt_lookup_max=4)
    for _ in range(200):
        for _ in range(1 + state % 3):
            state = (1103515245 * state + 12345) % 2**31
            tokens.append((state >> 16) % 3)
        request = DraftRequest("r", tokens, 5, SamplingParams())
        got = drafter.propose([request])
        assert got.tokens[0, : got.counts[0]].tolist() == brute_force(tokens, 5, 1, 4)
    drafter.reset("r")
    drafter.reset("never seen")
    assert propose(drafter, ([1, 2], 3)) == [[]]


@pytest.mark.parametrize(("least", "most"), [(0, 3), (4, 3)])
def test_refuses_lengths_that_make_no_sense(least, most):
    with pytest.raises(ArgumentError, match=f"prompt_lookup_min is {least}"):
        NgramDrafter(10, prompt_lookup_min=least, prompt_lookup_max=most)
