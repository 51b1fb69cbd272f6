"""Fused acceptance of trees on a GPU: the pure rule's paths, at a real vocabulary."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla import SamplingParams
from tests.kernels.accepting import MIXED, PLAIN
from tests.kernels.test_accept_tree import CHILDREN, Forest, make_forest

pytestmark = pytest.mark.gpu
WIDTH = 129_280
KINDS = {"plain": PLAIN * 3, "greedy-beside": [*PLAIN, SamplingParams(seed=7)], "mixed": MIXED}


@pytest.mark.parametrize("children", CHILDREN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["token_level", "sample_match"])
def test_decisions_are_those_of_the_rule(rule: str, kind: str, children: str) -> None:
    """A number within some 1e-6 of a border may fall on its other side: one request in two."""
    wrong = []
    for seed in range(2):
        forest = make_forest(KINDS[kind], children, seed, nodes=15, width=WIDTH)
        got = forest.fused(rule, block=None, slots=None)
        want, path, flagged = forest.pure(rule)
        assert not flagged.any()
        assert not got.flagged.any()
        differs = (got.tokens != want.tokens).any(1) | (got.rows != path.rows).any(1)
        wrong.append(differs | (got.end != path.end))
    assert torch.cat(wrong).sum() <= 1


@pytest.mark.parametrize("children", CHILDREN)
def test_repeats_are_equal_to_the_bit_and_requests_their_own(children: str) -> None:
    forest = make_forest(MIXED, children, 5, nodes=15, width=WIDTH)
    first = forest.fused("token_level", block=None, slots=None)
    for _ in range(20):
        again = forest.fused("token_level", block=None, slots=None)
        assert torch.equal(again.tokens, first.tokens)
        assert torch.equal(again.row_mass, first.row_mass)
    logits, table, drafts, q, seeds, positions = forest.step.inputs
    for b in range(len(MIXED)):
        one = slice(b, b + 1)
        alone = make_forest([MIXED[b]], children, 5, nodes=15, width=WIDTH)
        tree, at = alone.tree, forest.tree
        for own, whole in ((tree.parents, at.parents), (tree.ranks, at.ranks)):
            own.copy_(whole[one])
        tree.depths.copy_(at.depths[one])
        inputs = alone.step.inputs._replace(
            logits=logits,
            table=table[one],
            drafts=drafts[one],
            q=None if q is None else q[one].contiguous(),
            seeds=seeds[one],
            positions=positions[one],
        )
        got = Forest(alone.step._replace(inputs=inputs), tree).fused(
            "token_level", block=None, slots=None
        )
        assert torch.equal(got.tokens[0], first.tokens[b])
        assert torch.equal(got.rows[0], first.rows[b])
