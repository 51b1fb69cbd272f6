"""Statistics: hand-counted steps under vLLM's names."""

from __future__ import annotations

import json

import pytest

from specmla.errors import ArgumentError
from specmla.verify.stats import AcceptanceStats

# (drafts, accepted, emitted): full, partial, none accepted, no drafts, cut by a stop token.
STEPS = [(3, 3, 4), (3, 1, 2), (3, 0, 1), (0, 0, 1), (4, 4, 2)]


def counted(steps: list[tuple[int, int, int]]) -> AcceptanceStats:
    stats = AcceptanceStats()
    for step in steps:
        stats.observe(*step)
    return stats


def test_rates_by_hand() -> None:
    stats = counted(STEPS)
    assert (stats.num_steps, stats.num_spec_steps) == (5, 4)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (13, 8)
    assert stats.mean_acceptance_length == 1 + 8 / 4
    assert stats.draft_acceptance_rate == 8 / 13
    assert stats.acceptance_histogram == [1, 1, 0, 1, 1]
    assert stats.drafted_per_position == [4, 4, 4, 1]
    assert stats.accepted_per_position == [3, 2, 2, 1]
    assert stats.acceptance_rate_per_position == [3 / 4, 2 / 4, 2 / 4, 1 / 4]
    assert stats.tokens_per_step == (4 + 2 + 1 + 1 + 2) / 5


def test_places_that_never_succeed_are_listed_as_zero() -> None:
    stats = counted([(3, 0, 1)])
    assert stats.accepted_per_position == [0, 0, 0]
    assert stats.acceptance_histogram == [1, 0, 0, 0]


def test_identities_hold() -> None:
    stats = counted(STEPS)
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    weighted = sum(n * count for n, count in enumerate(stats.acceptance_histogram))
    assert weighted == stats.num_accepted_draft_tokens
    assert stats.mean_acceptance_length == pytest.approx(
        1 + sum(stats.acceptance_rate_per_position), rel=1e-15
    )


def test_steps_without_drafts_count_in_tokens_per_step_only() -> None:
    with_drafts = [s for s in STEPS if s[0]]
    plain, padded = counted(with_drafts), counted(with_drafts + [(0, 0, 1)] * 3)
    assert padded.mean_acceptance_length == plain.mean_acceptance_length
    assert padded.acceptance_histogram == plain.acceptance_histogram
    assert padded.tokens_per_step == (9 + 3) / 7


@pytest.mark.parametrize("cut", range(len(STEPS) + 1))
def test_merge_equals_one_run(cut: int) -> None:
    first, second = counted(STEPS[:cut]), counted(STEPS[cut:])
    first.merge(second)
    assert first == counted(STEPS)
    assert second == counted(STEPS[cut:])


def test_as_dict_is_json_and_complete() -> None:
    stats = counted(STEPS)
    read = json.loads(json.dumps(stats.as_dict()))
    for name, value in read.items():
        assert value == getattr(stats, name)
    assert {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "tokens_per_step",
    } <= read.keys()
    stats.as_dict()["acceptance_histogram"].append(9)  # type: ignore[union-attr]
    assert stats.acceptance_histogram == [1, 1, 0, 1, 1]


def test_nothing_observed_divides_nothing() -> None:
    read = json.loads(json.dumps(AcceptanceStats().as_dict(), allow_nan=False))
    assert read["mean_acceptance_length"] == 1.0
    assert read["tokens_per_step"] == read["draft_acceptance_rate"] == 0.0


@pytest.mark.parametrize("step", [(2, 3, 1), (2, -1, 1), (2, 1, 3), (2, 1, 0), (0, 0, 2)])
def test_observe_refuses_counts_no_step_can_have(step: tuple[int, int, int]) -> None:
    stats = AcceptanceStats()
    with pytest.raises(ArgumentError, match="accepted is"):
        stats.observe(*step)
    assert stats == AcceptanceStats()


def test_a_tree_counts_its_nodes_as_drafts_and_its_depths_as_places():
    stats = AcceptanceStats()
    stats.observe(7, 2, 3, num_levels=3)
    stats.observe(2, 2, 3)
    assert stats.num_draft_tokens == 9
    assert stats.drafted_per_position == [2, 2, 1]
    assert stats.accepted_per_position == [2, 2, 0]
    assert stats.acceptance_histogram == [0, 0, 2, 0]
    assert stats.draft_acceptance_rate == pytest.approx(4 / 9)
    for bad in ((3, 1, 1, 4), (3, 3, 1, 2), (3, 0, 1, 0)):
        with pytest.raises(ArgumentError, match="AcceptanceStats"):
            AcceptanceStats().observe(*bad)
