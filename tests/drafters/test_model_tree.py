"""Trees of a draft model: every node recomputed without a cache, whatever was accepted before."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random

import pytest
import torch

from drafters.model_tree import DraftModelTreeDrafter
from drafters.tree_shape import RATES, plan_tree, union
from specmla import (
    ArgumentError,
    DraftRequest,
    SamplingBatch,
    SamplingParams,
    UnsupportedError,
    processed_probs,
)
from specmla.verify.sibling_draws import without_replacement
from tests.drafters.test_draft_model import tiny
from tests.e2e.conftest import VOCAB, make_step, prompts, run


@pytest.fixture(scope="module")
def target():
    return tiny(2, 32, 1)


@pytest.fixture(scope="module")
def other():
    return tiny(1, 32, 5)


def make(model, page_size: int = 4, **options) -> DraftModelTreeDrafter:
    pages = options.pop("num_pages", 1600 // page_size)
    drafter = DraftModelTreeDrafter(
        model, num_pages=pages, page_size=page_size, backend="reference", **options
    )
    for layer in range(model.config.num_layers):
        drafter.cache.layer(layer).fill_(float("nan"))
    return drafter


def test_shapes_are_nested_and_numbered_by_path() -> None:
    for depth in (1, 2, 5):
        largest = plan_tree(40, depth)
        for count in (0, 1, 3, 17):
            assert plan_tree(count, depth).paths == largest.paths[:count]
        keys = [largest.key(node, len(RATES)) for node in range(-1, len(largest.paths))]
        assert len(set(keys)) == len(keys)
        assert all(largest.parents[i] < i for i in range(len(largest.paths)))
    small, wide = plan_tree(5, 4), plan_tree(12, 2)
    both = union(frozenset({small, wide}))
    assert set(both.paths) == {*small.paths, *wide.paths}
    for plan in (small, wide):
        for node, path in enumerate(plan.paths):
            at = both.place[path]
            assert both.key(at, 4) == plan.key(node, 4)
            assert both.paths[at][:-1] == (
                () if both.parents[at] < 0 else both.paths[both.parents[at]]
            )
    assert union(frozenset({small})) is small


def check(drafter: DraftModelTreeDrafter):
    """Compare every node with what one full pass over its path gives; count them."""
    real, counts = drafter.propose, {"nodes": 0, "missing": 0}

    def propose(requests):
        proposal = real(requests)
        by_name = {r.request_id: r for r in requests}
        assert sorted(proposal.request_ids) == sorted(by_name)
        for i, name in enumerate(proposal.request_ids):
            r, count = by_name[name], proposal.counts[i]
            if count:
                tokens = proposal.tokens[i].tolist()
                assert tokens[count:] == [-1] * (len(tokens) - count)
                probs = None if proposal.probs is None else proposal.probs[i]
                check_nodes(drafter, r, tokens[:count], proposal.parents[i], probs)
                counts["nodes"] += count
                counts["missing"] += tokens[:count].count(-1)
        return proposal

    drafter.propose = propose
    return counts


def check_nodes(drafter, r: DraftRequest, tokens, parents, probs) -> None:
    for parent in {-1, *parents} - {n for n, t in enumerate(tokens) if t < 0}:
        children = [node for node, above in enumerate(parents) if above == parent]
        path, at = [], parent
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        if not children or -1 in path:
            continue
        with torch.no_grad():
            logits = drafter.model.forward_full(torch.tensor([[*r.tokens, *path]]))[0, -1]
        mine = torch.tensor([tokens[node] for node in children])
        if r.sampling.temperature == 0:
            assert torch.equal(mine, logits.topk(len(children)).indices)
            continue
        q = processed_probs(logits[None, None], SamplingBatch.build([r.sampling], "cpu")).probs[0]
        want = without_replacement(q, mine[None])[0]
        # Renormalising over what elder siblings left amplifies float32 rounding.
        assert torch.allclose(probs[children], want, atol=1e-3)
        assert all(t < 0 or row[t] > 0 for t, row in zip(mine.tolist(), want, strict=True))


def batch_of(count: int, **sampling) -> dict:
    """Sampled requests, the first one greedy if there are several."""
    made = prompts(count, **sampling)
    if count > 2:
        made["r0"] = (made["r0"][0], SamplingParams(max_tokens=24))
    return made


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2}, {"temperature": 0.8, "top_k": 2}])
def test_every_node_equals_a_full_pass(target, other, page_size, sampling) -> None:
    """In lock step with a target that accepts some of it: its own model, and another."""
    for model in (target, other):
        drafter = make(model, page_size, depth=3)
        counts = check(drafter)
        wanted = {"r0": 9, "r1": 12, "r2": 2, "r3": 5}
        _, history = run(target, batch_of(5, **sampling), drafter, wanted, make_step(target, 4))
        results = [r for r in itertools.chain(*history) if r.num_drafts]
        assert counts["nodes"] > 150
        assert (counts["missing"] > 0) == ("top_k" in sampling)
        lengths = {len(r.path) for r in results if r.path is not None}
        assert lengths >= ({0, 1} if model is other else {3})
        assert drafter.blocks.num_free == drafter.blocks.num_pages


def test_greedy_loop_equals_plain(target, other) -> None:
    plain, _ = run(target, prompts(6))
    younger = 0
    for model in (target, other):
        drafter = make(model)
        tokens, history = run(target, prompts(6), drafter, 14)
        assert tokens == plain
        results = [r for r in itertools.chain(*history) if r.num_levels == 4]
        younger += sum(any(drafter_ranks(14, r)) for r in results)
        if model is target:
            assert {r.num_accepted for r in results} == {4}
            assert younger == 0
    assert younger > 5


def drafter_ranks(num_nodes: int, result) -> list[int]:
    """Give the ranks of the accepted nodes among their siblings."""
    paths = plan_tree(num_nodes, 4).paths
    return [paths[node][-1] for node in result.path]


def test_a_request_draws_the_same_whatever_its_batch_mates(other) -> None:
    sampling = SamplingParams(0.9, seed=11)
    mine = DraftRequest("mine", [1, 2, 3, 4], 3, sampling, 7)
    alone = make(other).propose([mine])
    mates = [
        DraftRequest("deep", [5, 6], 9, SamplingParams(1.0, seed=2), 30),
        DraftRequest("none", [5], 0, SamplingParams(1.0, seed=3)),
        DraftRequest("greedy", [7, 8, 9], 2, SamplingParams(), 9),
    ]
    beside = make(other, depth=4).propose([mates[0], mine, *mates[1:]])
    at = beside.request_ids.index("mine")
    count = beside.counts[at]
    assert count == alone.counts[0] == 7
    assert torch.equal(beside.tokens[at, :count], alone.tokens[0, :count])
    assert tuple(beside.parents[at]) == tuple(alone.parents[0])
    assert torch.allclose(beside.probs[at, :count], alone.probs[0, :count], atol=1e-5)
    assert beside.counts[beside.request_ids.index("none")] == 0


def test_drafting_ends_with_the_draft_models_context(target) -> None:
    short = tiny(1, 32, 5, limit=30)
    drafter = make(short, depth=3)
    counts = check(drafter)
    plain, _ = run(target, prompts(6))
    tokens, history = run(target, prompts(6), drafter, 12)
    assert tokens == plain
    assert counts["nodes"] > 50
    last = [r for r in history[-2] if not r.is_prompt]
    assert any(r.num_drafts == 0 for r in last)


def test_the_bookkeeping_survives_random_acceptances(other) -> None:
    """Results that no target gave: any path, stops, skipped steps, forgotten requests."""
    rng = random.Random(4)
    drafter = make(other, 3, depth=3, num_pages=120)
    counts = check(drafter)
    texts = {name: list(tokens) for name, (tokens, _) in prompts(5).items()}
    for _ in range(30):
        names = rng.sample(list(texts), rng.randint(1, 5))
        asked = [
            DraftRequest(n, texts[n], rng.randint(0, 4), SamplingParams(0.9, seed=7), 9)
            for n in names
        ]
        proposal = drafter.propose(asked)
        drafter.blocks.check_integrity()
        drafter.observe([answer(rng, proposal, i, texts) for i in range(len(names))])
        drafter.blocks.check_integrity()
        name = rng.choice(list(texts))
        if len(texts[name]) > 100 or rng.random() < 0.1:
            drafter.reset(name)
            texts[name] = texts[name][:3]
    assert counts["nodes"] > 150


def answer(rng: random.Random, proposal, i: int, texts: dict):
    """Accept a random path of a proposal."""
    from specmla import RequestResult

    name, count = proposal.request_ids[i], proposal.counts[i]
    tokens = proposal.tokens[i].tolist()
    parents = proposal.parents[i] or () if proposal.parents else ()
    path, at = [], -1
    while rng.random() < 0.8:
        children = [n for n in range(count) if parents[n] == at and tokens[n] >= 0]
        if not children:
            break
        at = rng.choice(children)
        path.append(at)
    new = [*(tokens[n] for n in path), rng.randrange(VOCAB)]
    texts[name] += new
    return RequestResult(name, tuple(new), count, len(path), None, path=tuple(path))


def test_what_can_not_be_is_refused(other) -> None:
    with pytest.raises(ArgumentError, match=r"rates are \(0.1, 0.5\).*depth is 0"):
        make(other, depth=0, rates=(0.1, 0.5))
    with pytest.raises(ArgumentError, match=r"depth is 13, accepted are integers 1 to 12"):
        make(other, depth=13)
    with pytest.raises(ArgumentError, match=r"depth is 1\.5, accepted are integers 1 to 12"):
        make(other, depth=1.5)
    pytest.importorskip("triton")
    wide = copy.copy(tiny(1, 32, 5))
    wide.config = dataclasses.replace(
        wide.config, attention=dataclasses.replace(wide.config.attention, qk_rope_head_dim=16)
    )
    with pytest.raises(UnsupportedError, match="rows: it serves no trees"):
        DraftModelTreeDrafter(wide, num_pages=10, page_size=16, backend="rows")
