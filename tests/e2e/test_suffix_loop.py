"""The loop with suffix drafts: chains, trees, and both in one step."""

from __future__ import annotations

import pytest

from drafters.suffix import SuffixDrafter
from specmla import DraftRequest, SamplingParams
from tests.e2e.conftest import VOCAB, make_step, prompts, run


def taught(plain: dict[str, list[int]], **options) -> SuffixDrafter:
    """Give a drafter that knows the right outputs, but first two that differ now and then."""
    drafter = SuffixDrafter(VOCAB, **options)
    for name, (prompt, _) in prompts(6).items():
        for version in (1, 2, 0):
            new = [(t + version) % VOCAB if i % 4 == 2 else t for i, t in enumerate(plain[name])]
            drafter.propose([DraftRequest("past", [*prompt, *new], 0, SamplingParams())])
            drafter.reset("past")
    return drafter


@pytest.mark.parametrize("tree", [False, True])
def test_greedy_loop_equals_plain(model, tree: bool) -> None:
    """Twice with one drafter: the second time it knows the outputs."""
    batch = prompts(6, max_tokens=40)
    plain, _ = run(model, batch)
    drafter = SuffixDrafter(VOCAB, tree=tree)
    accepted = []
    for _ in range(2):
        tokens, history = run(model, batch, drafter, 12)
        assert tokens == plain
        accepted.append(sum(r.num_accepted for results in history for r in results))
    assert accepted[1] > accepted[0] > 0
    assert not drafter._own  # finished requests leave nothing but their outputs


def test_trees_beat_chains_where_the_past_is_divided(model) -> None:
    batch = prompts(6)
    plain, _ = run(model, batch)
    steps = {}
    for tree in (False, True):
        tokens, history = run(
            model, batch, taught(plain, tree=tree, longest_match=2, max_spec_factor=8.0), 12
        )
        assert tokens == plain
        steps[tree] = sum(map(len, history))
        assert any(r.path for results in history for r in results) == tree
    assert steps[True] < steps[False]


def test_trees_chains_and_nothing_share_a_step(model) -> None:
    """One node is a chain; a request without a budget gets none."""
    batch = prompts(4)
    plain, _ = run(model, prompts(6))
    wanted = {"r0": 9, "r1": 1, "r2": 6}  # r3 gets none
    drafter = taught(plain, tree=True, max_spec_factor=4.0)
    tokens, history = run(model, batch, drafter, wanted, make_step(model))
    assert tokens == {name: plain[name] for name in batch}
    kinds = [{(r.path is None, r.num_drafts > 0) for r in results} for results in history]
    assert any({(False, True), (True, True), (True, False)} <= kind for kind in kinds)
