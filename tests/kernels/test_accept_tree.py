"""Fused acceptance of trees under the interpreter: the pure rule's paths on the same numbers."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.kernels.accept import AcceptInputs
from specmla.kernels.accept_tree import TreeAccepted, fused_accept_tree
from specmla.staging import send_arrays
from specmla.verify.accept import find_rule
from specmla.verify.sampling import SamplingParams, processed_probs
from specmla.verify.tree import TreeTables, keep_nodes, tree_arrays, tree_tables
from specmla.verify.tree_judge import TreeStep, decide_trees
from tests.kernels.accepting import DEVICE, MIXED, PLAIN, Step, make_step

BLOCK = 32 if DEVICE == "cpu" else 256  # on a GPU no less than a program has threads
WIDTH = 50 if DEVICE == "cpu" else 700
CHILDREN = ("one-hot", "replaced", "not replaced")


class Forest(NamedTuple):
    """A step and its trees."""

    step: Step
    tree: TreeTables

    def fused(self, rule: str, block: int | None = BLOCK, slots: int | None = 32) -> TreeAccepted:
        shape = (self.tree.parents, self.tree.ranks, self.tree.depths)
        inputs, filters = self.step.inputs, self.step.filters
        return fused_accept_tree(inputs, filters, shape, rule, block=block, slots=slots)

    def pure(self, rule: str):
        """Give acceptance, path and flags of rows [B]."""
        logits, table, drafts, q, seeds, positions = self.step.inputs
        probs, flagged = processed_probs(logits[table], self.step.batch)
        made = torch.nn.functional.pad(drafts >= 0, (1, 0), value=True)
        step = TreeStep(self.tree, probs, drafts, q)
        return *decide_trees(find_rule(rule), step, seeds, positions), (flagged & made).any(1)


def grow(rng: Random, count: int) -> list[int]:
    """A tree of `count` nodes whose parents (-1 the anchor) stand in any order."""
    grown = [rng.randrange(max(-1, node - 4), node) for node in range(count)]
    order = rng.sample(range(count), count)
    parents = [0] * count
    for node, parent in enumerate(grown):
        parents[order[node]] = -1 if parent < 0 else order[parent]
    return parents


def make_forest(
    params: list[SamplingParams], children: str, seed: int, nodes: int = 6, width: int = WIDTH
) -> Forest:
    """Draw trees of up to `nodes` nodes; q lies near p, drafts are drawn from it."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    counts = [nodes - b % 3 for b in range(len(params))]
    step = make_step(params, num_drafts=nodes, width=width, seed=seed)
    logits, table, drafts, _, seeds, positions = step.inputs
    trees = [keep_nodes(grow(rng, count), count, count) for count in counts]
    arrays = tree_arrays(trees, counts, nodes)
    tree = tree_tables(send_arrays(arrays, logits.device), trees, counts)
    q = torch.zeros(len(params), nodes, width)
    drafts.fill_(-1)
    for b, kept in enumerate(trees):
        table[b, counts[b] + 1 :] = table[b, counts[b]]
        elder: dict[int, list[int]] = {}
        for node, parent in enumerate(kept.parents):
            near = logits[table[b, parent]].float().cpu() + torch.randn(
                width, generator=torch.Generator().manual_seed(31 * b + parent)
            )
            row = near.softmax(-1)
            if children == "not replaced" or (children == "one-hot" and rng.random() < 0.8):
                row[elder.get(parent, [])] = 0.0
                row /= row.sum()
            q[b, node] = row
            drafts[b, node] = torch.multinomial(row, 1, generator=generator)
            elder.setdefault(parent, []).append(int(drafts[b, node]))
    given = None if children == "one-hot" else q.to(logits.device)
    inputs = AcceptInputs(logits, table, drafts, given, seeds, positions)
    return Forest(Step(inputs, step.batch), tree)


def check(forest: Forest, rule: str) -> Tensor:
    """Compare all decisions; give the numbers of accepted drafts."""
    got, (want, path, flagged) = forest.fused(rule), forest.pure(rule)
    assert torch.equal(got.flagged != 0, flagged | want.flagged)
    good = got.flagged == 0
    assert torch.equal(got.num_accepted[good], want.num_accepted[good])
    assert torch.equal(got.tokens[good], want.tokens[good])
    assert torch.equal(got.rows[good], path.rows[good])
    assert torch.equal(got.end[good], path.end[good])
    assert torch.equal(got.next_token[good], want.next_token[good])
    return got.num_accepted


@pytest.mark.parametrize("children", CHILDREN)
@pytest.mark.parametrize("rule", ["token_level", "sample_match"])
def test_plain_temperature(rule: str, children: str) -> None:
    accepted = [check(make_forest(PLAIN, children, seed), rule) for seed in range(2)]
    assert int(torch.cat(accepted).sum()) > 2


@pytest.mark.parametrize(
    ("rule", "children"),
    [*(("token_level", children) for children in CHILDREN), ("sample_match", "one-hot")],
)
def test_mixed_filters_and_greedy(rule: str, children: str) -> None:
    some = MIXED[:5] if children == "replaced" else MIXED[3:]
    check(make_forest(some, children, 10, nodes=4), rule)


@pytest.mark.parametrize("children", CHILDREN)
def test_greedy_beside_sampled_without_filters(children: str) -> None:
    params = [SamplingParams(seed=1), SamplingParams(1.0, seed=2), SamplingParams(seed=3)]
    forest = make_forest(params, children, 20)
    logits, table, drafts, q = forest.step.inputs[:4]
    for node in range(drafts.shape[1]):  # all children of a greedy row are its token
        parent = int(forest.tree.parents[0, node])
        drafts[0, node] = logits[table[0, parent]].argmax()
        if q is not None:
            q[0, node] = torch.nn.functional.one_hot(drafts[0, node], q.shape[2]).float()
    for rule in ("token_level", "sample_match"):
        assert check(forest, rule)[0] > 0


@pytest.mark.parametrize("children", CHILDREN)
def test_missing_drafts_ids_outside_and_equal_siblings(children: str) -> None:
    """What was not drafted is passed over, and nobody computed its rows, nor wrote its q."""
    forest = make_forest(PLAIN * 2, children, 30)
    logits, table, drafts, q = forest.step.inputs[:4]
    first = [int((forest.tree.parents[b] == 0).nonzero()[0]) for b in range(len(drafts))]
    drafts[0, first[0]] = -1
    logits[table[0, first[0] + 1]] = math.nan
    drafts[1, first[1]] = 2**40
    drafts[2] = -1
    logits[table[2, 1:]] = math.nan
    table[2, 1:] = table[2, 0]
    if q is not None:
        q[2] = math.nan
        q[0, first[0]] = math.nan
    else:
        drafts[3] = drafts[3, 0]
    for rule in ("token_level", "sample_match"):
        got = check(forest, rule)
        assert got[2] == 0


def test_q_that_covers_what_is_left_takes_nothing_away() -> None:
    """Two children of q = p: the second one is tried as if the first had not been there."""
    forest = make_forest(PLAIN * 2, "replaced", 40)
    q = forest.step.inputs.q
    logits, table = forest.step.inputs[:2]
    assert q is not None
    probs, _ = processed_probs(logits[table], forest.step.batch)
    parents = forest.tree.parents[..., None].expand(-1, -1, probs.shape[-1])
    q.copy_(probs.gather(1, parents))
    got = forest.fused("token_level")
    assert bool((got.flagged == 0).all())
    assert int(got.num_accepted.sum()) >= len(q)  # ratios are 1 but for rounding


def test_rows_without_a_distribution_are_flagged() -> None:
    rule = "token_level"
    for children in ("one-hot", "replaced"):
        forest = make_forest(PLAIN * 2, children, 50, nodes=3)
        logits, table = forest.step.inputs[:2]
        logits[table[0, 0], 49] = math.nan
        logits[table[1, 2], 3] = math.inf
        logits[table[2, 2]] = -math.inf
        check(forest, rule)
        assert forest.fused(rule).flagged.tolist()[:4] == [1, 1, 1, 0]


def test_nan_of_q_is_flagged_where_a_token_comes_from_it() -> None:
    forest = make_forest(PLAIN * 2, "replaced", 60)
    q, drafts = forest.step.inputs.q, forest.step.inputs.drafts
    assert q is not None
    q[:, :, 5] = math.nan
    drafts[drafts >= 0] = 49  # improbable to both, so that some are refused
    got = forest.fused("token_level")
    refused = got.num_accepted == 0
    assert refused.any()
    assert (got.flagged[refused] == 1).all()


def test_wrong_ranks_are_noticed() -> None:
    """Were siblings tried in another order, or with each other's numbers, paths would differ."""
    differs = 0
    for seed in range(4):
        forest = make_forest(PLAIN, "replaced", seed)
        ranks = forest.tree.ranks
        most = ranks.new_zeros(len(ranks), ranks.shape[1] + 1)
        most.scatter_reduce_(1, forest.tree.parents, ranks, "amax")
        ranks.copy_(most.gather(1, forest.tree.parents) - ranks)
        got = forest.fused("token_level")
        again = make_forest(PLAIN, "replaced", seed).pure("token_level")[0]
        differs += int((got.tokens != again.tokens).any())
    assert differs
