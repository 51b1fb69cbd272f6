"""Suffix decoding: the index against counting by hand, candidates, other requests' outputs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from drafters.suffix import SuffixDrafter
from drafters.suffix_index import SuffixIndex
from specmla import ArgumentError, DraftRequest, SamplingParams


def places_after(texts: list[list[int]], string: list[int]) -> Counter[int]:
    """Count what follows a string in some texts, -1 where a text ends."""
    found: Counter[int] = Counter()
    for text in texts:
        for end in range(len(string), len(text) + 1):
            if text[end - len(string) : end] == string:
                found[text[end] if end < len(text) else -1] += 1
    return found


def test_the_index_counts_what_is_there() -> None:
    rng = random.Random(3)
    for _ in range(60):
        index = SuffixIndex()
        texts = [[rng.randrange(3) for _ in range(rng.randint(1, 25))] for _ in range(3)]
        for text in texts:
            for start in range(0, len(text), 4):  # token by token or in pieces: the same
                index.extend(text[start : start + 4])
            index.close()
        context = [rng.randrange(3) for _ in range(10)]
        found = dict(index.matches(context, 8))
        lengths = [n for n in range(1, 9) if places_after(texts, context[-n:]).total()]
        counts = {n: +places_after(texts, context[-n:]) for n in lengths}
        # A text's last token is followed by nothing: it is only known if something follows it.
        inner = {n: c.total() - c[-1] for n, c in counts.items()}
        kept = [n for n in lengths if inner[n] and inner.get(n + 1) != inner[n]]
        assert [n for n, places in found.items() if index.children(places)] == kept
        for n in kept:
            groups = index.children(found[n])
            assert {t: len(at) for t, at in groups.items()} == {
                t: c for t, c in counts[n].items() if t >= 0
            }
            for token, at in groups.items():  # and one level further down
                below = {t: len(places) for t, places in index.children(at).items()}
                want = places_after(texts, [*context[-n:], token])
                assert below == {t: c for t, c in want.items() if t >= 0}


def test_old_texts_are_dropped() -> None:
    index = SuffixIndex(max_tokens=40)
    for i in range(50):
        index.extend([i, i, i, 99, i, 7, 7])
        index.close()
        assert len(index) <= 40
        assert sum(map(len, index._places.values())) <= 40 * 3
        latest = dict(index.matches([7, i, i], 3))
        assert index.children(latest[2]) != {}
    assert list(index.matches([0, 0], 2)) == []  # text 0 is gone
    assert max(at for all_at in index._places.values() for at in all_at) <= len(index)


def test_frequent_strings_keep_their_latest_places() -> None:
    index = SuffixIndex(max_places=4)
    index.extend([1, 2] * 30 + [1, 3] * 4 + [1])
    ((_, places),) = list(index.matches([5, 1], 2))
    assert {t: len(at) for t, at in index.children(places).items()} == {3: 4}


def request(tokens: list[int], drafts: int = 8, nodes: int = 0, name: str = "a") -> DraftRequest:
    return DraftRequest(name, tokens, drafts, SamplingParams(), nodes or drafts)


def drafts(drafter: SuffixDrafter, r: DraftRequest) -> list[int]:
    proposal = drafter.propose([r])
    return proposal.tokens[0, : proposal.counts[0]].tolist()


def test_a_chain_follows_the_counts() -> None:
    # After 1 2: 3 twice, 4 once. After 1 2 3: 5 both times, and so on.
    text = [1, 2, 3, 5, 9, 1, 2, 4, 6, 1, 2, 3, 5, 8, 1, 2]
    drafter = SuffixDrafter(16, max_spec_factor=4.0)
    assert drafts(drafter, request(text)) == [3, 5, 9, 1, 2, 4, 6, 1]  # 2/3, 2/3, 1/3, ...
    picky = SuffixDrafter(16, max_spec_factor=4.0, min_token_prob=0.5)
    assert drafts(picky, request(text)) == [3, 5]
    assert drafts(SuffixDrafter(16), request(text)) == [3, 5]  # a match of 2 gives 2 tokens
    assert drafts(SuffixDrafter(16, max_spec_offset=1), request(text)) == [3, 5, 9]
    assert drafts(SuffixDrafter(16, max_spec_factor=4.0), request(text, 1)) == [3]
    assert drafts(SuffixDrafter(16), request(text, 0)) == []
    assert drafts(SuffixDrafter(16), request([1, 2, 3])) == []


def test_the_match_with_the_largest_expected_length_wins() -> None:
    # A long match whose continuation is certain against a short one that splits.
    text = [7, 1, 2, 3, 4, 5, 9, 3, 8, 9, 3, 8, 1, 2, 3]
    assert drafts(SuffixDrafter(16, min_token_prob=0.3), request(text)) == [4, 5, 9]
    # A tie of scores goes to the longer match: after 2, 3 and after 3 alone comes 4, once.
    drafter = SuffixDrafter(16, max_spec_factor=0.0, max_spec_offset=1.0)
    assert drafts(drafter, request([2, 3, 4, 3, 5, 2, 3])) == [4]


def test_a_tree_takes_the_likeliest_nodes_first() -> None:
    text = [1, 2, 3, 5, 9, 1, 2, 4, 6, 1, 2, 3, 5, 8, 1, 2]
    drafter = SuffixDrafter(16, tree=True, max_spec_factor=4.0)
    proposal = drafter.propose([request(text, 2, 5)])
    # 3 (2/3), 5 below it (2/3), 4 (1/3), 6 below it (1/3); level 3 is out of reach.
    assert proposal.tokens[0].tolist() == [3, 5, 4, 6]
    assert proposal.parents is not None
    assert list(proposal.parents[0]) == [-1, 0, -1, 2]
    proposal = drafter.propose([request(text, 8, 3)])
    assert proposal.tokens[0].tolist() == [3, 5, 4]
    proposal = drafter.propose([request(text, 8, 6), request([5, 6], 8, 6, "b")])
    assert proposal.counts == (6, 0)
    assert proposal.tokens[0].tolist() == [3, 5, 4, 9, 8, 6]  # ties: what was found first
    assert list(proposal.parents[0]) == [-1, 0, -1, 1, 1, 2]


def test_finished_outputs_serve_other_requests() -> None:
    drafter = SuffixDrafter(16, max_spec_factor=2.0)
    assert drafts(drafter, request([1, 2, 3, 4], name="first")) == []
    drafter.propose([request([1, 2, 3, 4, 5, 6, 7], name="first")])
    assert drafts(drafter, request([9, 4, 5], name="second")) == []  # not while it runs
    drafter.reset("first")
    drafter.reset("never seen")
    assert drafts(drafter, request([9, 4, 5], name="third")) == [6, 7]
    assert drafts(drafter, request([9, 3, 4], name="fourth")) == [5, 6, 7]  # from its prompt's end
    alone = SuffixDrafter(16, max_spec_factor=2.0, max_cached_tokens=0)
    alone.propose([request([1, 2, 3, 4, 5, 6, 7], name="first")])
    alone.reset("first")
    assert drafts(alone, request([9, 4, 5], name="second")) == []


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"longest_match is 0.*max_spec_factor.*min_token_prob"):
        SuffixDrafter(16, longest_match=0, max_spec_factor=-1, min_token_prob=0)
    with pytest.raises(ArgumentError, match="max_cached_tokens"):
        SuffixDrafter(16, max_cached_tokens=-1)


@pytest.mark.parametrize(
    ("size", "options", "reasons"),
    [
        (-5, {}, ("vocab_size is -5, accepted are integers >= 1",)),
        (2.5, {"longest_match": 1.5}, ("vocab_size is 2.5", "longest_match is 1.5")),
        (16, {"max_spec_offset": float("inf")}, ("max_spec_offset inf",)),
        (16, {"max_spec_factor": float("nan")}, ("max_spec_factor is nan",)),
        (16, {"max_cached_tokens": 0.5, "longest_match": True}, ("is 0.5", "is True")),
    ],
)
def test_wrong_kinds_are_refused_when_it_is_made(size, options, reasons) -> None:
    with pytest.raises(ArgumentError) as caught:
        SuffixDrafter(size, **options)
    assert all(reason in str(caught.value) for reason in reasons)
