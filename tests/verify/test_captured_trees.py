"""Captured steps of trees: replays decide as eager steps do, whatever trees there are."""

from __future__ import annotations

import random

import pytest
import torch

from drafters import DDTreeDrafter, DraftModelTreeDrafter, SuffixDrafter
from specmla import ArgumentError, DraftProposal, generate
from specmla.bucket import Bucket
from specmla.verify.captured import CapturedStep
from specmla.verify.captured_buckets import doubling_buckets
from specmla.verify.captured_trees import padded_tables, padded_trees
from specmla.verify.tree import keep_nodes, tree_shape
from specmla.verify.tree_rules import multi_round
from tests.drafters.guards import guard_records
from tests.drafters.test_draft_model import tiny
from tests.e2e.conftest import VOCAB, make_step, prompts
from tests.e2e.conftest import model as model
from tests.verify.test_captured import FILTERED, GREEDY, SAMPLED, forward_of, pool_of, started

NODES = 6


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def random_parents(rng: random.Random, count: int) -> list[int]:
    """A tree in any node order; a chain now and then, and flat ones."""
    kind = rng.randrange(4)
    if kind == 0:
        return list(range(-1, count - 1))
    if kind == 1:
        return [-1] * count
    links = [rng.randrange(-1, i) for i in range(count)]
    place = list(range(count))
    rng.shuffle(place)
    found = [0] * count
    for node, parent in enumerate(links):
        found[place[node]] = -1 if parent < 0 else place[parent]
    return found


def propose(step, rng: random.Random, *, has_probs: bool, names=None, likely=None) -> DraftProposal:
    """Trees, chains and none; of tokens that are likely after the anchor, if these are given."""
    names = list(step.active) if names is None else names
    counts = [rng.randint(0, NODES) for _ in names]
    width = max([1, *counts])
    pools = likely or dict.fromkeys(names, range(6))
    tokens = torch.tensor([[rng.choice(pools[name]) for _ in range(width)] for name in names])
    parents = tuple(None if rng.random() < 0.2 else random_parents(rng, n) for n in counts)
    probs = None
    if has_probs:
        rows = torch.tensor([[[rng.random() for _ in range(VOCAB)] for _ in range(width)]
                             for _ in names])  # fmt: skip
        rows[..., :6] += 4
        probs = rows / rows.sum(-1, keepdim=True)
    return DraftProposal(tuple(names), tuple(counts), tokens, probs, parents)


@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
@pytest.mark.parametrize("kinds", [[GREEDY] * 3, [SAMPLED] * 3, [GREEDY, SAMPLED, FILTERED]],
                         ids=["greedy", "sampled", "mixed"])  # fmt: skip
def test_replays_equal_eager_steps(model, kinds, rule):
    ours, plain = (started(model, kinds, rule=rule) for _ in range(2))
    forward = forward_of(model, plain)
    graphs = CapturedStep(
        ours,
        forward_of(model, ours),
        [Bucket(4, 1 + NODES, trees=True), Bucket(2, 4, trees=True), Bucket(3, 3)],
        sampling=kinds,
        draft_probs=None,
    )
    accepted = 0
    for turn in range(10):
        if not plain.active:
            break
        has_probs = turn % 2 == 1
        likely = {
            name: model.forward_full(torch.tensor([list(plain.tokens(name))]))[0, -1]
            .topk(4)
            .indices.tolist()
            for name in plain.active
        }
        proposals = [
            propose(step, random.Random(turn), has_probs=has_probs, likely=likely)
            for step in (plain, ours)
        ]
        plan = plain.plan(proposals[0])
        expected = plain.commit(plan, plain.verify(plan, forward(plan)))
        verdict = graphs.run(proposals[1])
        assert ours.commit(verdict.plan, verdict) == expected
        accepted += sum(r.num_accepted for r in expected)
        for name in plain.active:
            assert list(ours.tokens(name)) == list(plain.tokens(name))
    assert accepted > 3
    ours.blocks.check_integrity()


def test_a_tree_that_the_target_would_write_stands(model):
    """The right path hidden among wrong siblings, over several steps."""
    ours, plain = started(model, [GREEDY, GREEDY]), started(model, [GREEDY, GREEDY])
    forward = forward_of(model, plain)
    written: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(20):
        plan = plain.plan()
        for r in plain.commit(plan, plain.verify(plan, forward(plan))):
            written[r.request_id] += r.new_tokens
    graphs = CapturedStep(ours, forward_of(model, ours), [Bucket(2, 7, trees=True)])
    made: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(4):
        rows = []
        for name in (0, 1):
            right = written[name][len(made[name]) :][:3]
            wrong = [(t + 1) % VOCAB for t in right]
            rows.append([right[1], wrong[0], right[0], wrong[2], right[2], wrong[1]])
        proposal = DraftProposal(
            (0, 1), (6, 6), torch.tensor(rows), parents=((2, -1, -1, 0, 0, 2),) * 2
        )
        verdict = graphs.run(proposal)
        for r in ours.commit(verdict.plan, verdict):
            assert (r.num_accepted, r.path) == (3, (2, 0, 4))
            made[r.request_id] += r.new_tokens
    assert made == {name: tokens[:16] for name, tokens in written.items()}


def test_a_replay_writes_its_own_slots_alone(model):
    step = started(model, [GREEDY] * 3)
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(4, 1 + NODES, trees=True)])
    for turn in range(3):
        before = pool_of(step)
        rng = random.Random(turn)
        plan = graphs.plan(propose(step, rng, has_probs=False, names=[0, 2]), [0, 2])
        slots = plan.metadata.slot_mapping
        mine = slots[slots >= 0]
        assert len(mine) == sum(1 + r.num_drafts for r in plan.requests)
        verdict = graphs.verify(plan)
        after = pool_of(step)
        before[:, mine] = after[:, mine]
        assert torch.equal(after, before)
        step.commit(plan, verdict)


@pytest.mark.parametrize("sparse", [False, True], ids=["drawn", "chosen"])
def test_padded_rounds_give_the_terms_of_exact_ones_to_the_bit(sparse):
    """Flat trees of as many siblings as there are, deep ones, and none; K / (r + 1) of rank r."""
    from specmla.verify.tree import tree_arrays, tree_tables

    rng, bucket = random.Random(3), Bucket(5, 1 + 7, trees=True)
    shapes = [[-1] * 7, list(range(-1, 6)), [-1, -1, 0, 0, 1, 1, 1], [], random_parents(rng, 5)]
    trees = [keep_nodes(parents, 63, 63) for parents in shapes]
    counts = [len(tree.nodes) for tree in trees]

    class Planned:
        def __init__(self, tree, num_drafts):
            self.tree, self.num_drafts = tree, num_drafts

    sent = {n: torch.tensor(v) for n, v in tree_arrays(trees, counts, 7).items()}
    exact = tree_tables(sent, trees, counts)
    planned = [Planned(t, n) for t, n in zip(trees, counts, strict=True)]
    padded = padded_tables(
        bucket, {n: torch.tensor(v) for n, v in padded_trees(bucket, planned).items()}
    )
    assert padded.rank_ends[-1] == 5 * (7 + 3 + 2 + 1 + 1 + 1 + 1)
    assert max(max(tree_shape(t.parents).ranks, default=0) for t in trees) == 6
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(5, 8, 11, generator=generator)
    p = p / p.sum(-1, keepdim=True)
    q = torch.rand(5, 7, 11, generator=generator)
    q = None if sparse else q / q.sum(-1, keepdim=True)
    drafts = torch.randint(11, (5, 7), generator=generator)
    wanted, found = multi_round(p, drafts, q, exact), multi_round(p, drafts, q, padded)
    assert torch.equal(found.correction, wanted.correction)
    assert torch.equal(found.accept, wanted.accept)


def test_trees_that_were_not_captured_are_refused(model):
    step = started(model, [GREEDY])
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(1, 4, trees=True), Bucket(1, 9)])
    tokens = torch.tensor([[1, 2, 3, 4]])
    wide = DraftProposal((0,), (4,), tokens, parents=((-1, -1, 0, 0),))
    with pytest.raises(
        ArgumentError, match=r"captured is 1 to 4.*there are trees, captured are ch"
    ):
        graphs.plan(wide)
    chain = DraftProposal((0,), (4,), tokens)
    verdict = graphs.run(chain)
    assert verdict.plan.tree is None, "a chain takes the bucket of chains"
    step.commit(verdict.plan, verdict)


def test_a_tree_has_no_more_rows_than_a_word_has_bits(model):
    step = started(model, [GREEDY])
    with pytest.raises(ArgumentError, match="query_len is 65, accepted in trees is 1 to 64"):
        CapturedStep(step, forward_of(model, step), [Bucket(1, 65, trees=True)])
    assert [b.trees for b in doubling_buckets(2, 5, trees=True)] == [False, True] * 2


def test_drafters_of_trees_say_so():
    assert SuffixDrafter(VOCAB, tree=True).drafts_trees
    assert not SuffixDrafter(VOCAB).drafts_trees
    assert DDTreeDrafter.drafts_trees


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_loop_captures_trees(model, temperature, monkeypatch):
    replayed, real, runs = [], CapturedStep.choose, []

    def choose(self, planned, *args):
        found = real(self, planned, *args)
        if any(r.tree for r in planned) and not any(r.is_prompt for r in planned):
            replayed.append(found != self.step.lay_out)
        return found

    monkeypatch.setattr(CapturedStep, "choose", choose)
    for graphs in (False, True):
        replayed.clear()
        step = make_step(model)
        tokens: dict[str, list[int]] = {name: [] for name in prompts(4)}
        batch = prompts(4, temperature=temperature)
        drafter = DraftModelTreeDrafter(
            tiny(1, 16, 2), num_pages=600, page_size=4, backend="reference"
        )
        for results in generate(model, step, batch, drafter, 6, graphs=graphs):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        runs.append(tokens)
    assert replayed
    assert all(replayed)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
def test_a_replay_reads_nothing_back(model, rule, monkeypatch):
    calls, kinds = guard_records(monkeypatch), [GREEDY, SAMPLED, FILTERED]
    step = started(model, kinds, rule=rule)
    buckets = [Bucket(4, 1 + NODES, trees=True), Bucket(4, 1 + NODES)]
    graphs = CapturedStep(step, forward_of(model, step), buckets, sampling=kinds, draft_probs=None)
    for turn in range(4):
        verdict = graphs.run(propose(step, random.Random(turn), has_probs=turn % 2 == 1))
        step.commit(verdict.plan, verdict)
    assert len(calls) == 4
