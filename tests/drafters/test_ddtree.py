"""Best-first trees: against every node there is, and from a block drafter's marginals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from drafters import DFlashDrafter
from drafters.best_tree import best_tree
from drafters.ddtree import DDTreeDrafter, likeliest
from drafters.tree_shape import plan_tree
from specmla import ArgumentError, DraftRequest, SamplingParams
from specmla.verify.sibling_draws import without_replacement
from tests.drafters.networks import block_logits, tiny_block, tiny_target
from tests.e2e.conftest import make_step, prompts, run


def marginals(seed: int, levels: int, width: int, sharp: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(levels, width, generator=generator, dtype=torch.float64) * sharp
    return torch.log_softmax(logits, -1)


def paths(tree) -> list[tuple[int, ...]]:
    """Give the ranks on the way to each node."""
    found: list[tuple[int, ...]] = []
    for level, rank, parent in zip(tree.levels, tree.ranks, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), rank))
        assert len(found[-1]) == level + 1
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_nodes_are_the_likeliest_there_are(seed: int) -> None:
    levels, width = 1 + seed % 4, 2 + seed % 3
    log_probs = likeliest(marginals(seed, levels, width), width)[0].tolist()
    every = {
        ranks: sum(log_probs[level][rank] for level, rank in enumerate(ranks))
        for depth in range(1, levels + 1)
        for ranks in itertools.product(range(width), repeat=depth)
    }
    best = sorted(every.values(), reverse=True)
    for count in (1, 2, 5, 17, len(every), len(every) + 9):
        tree = best_tree(log_probs, count)
        found = paths(tree)
        assert len(set(found)) == len(found) == min(count, len(every))
        chances = [every[path] for path in found]
        assert chances == pytest.approx(best[:count], abs=1e-12)
        assert tree.score == pytest.approx(sum(map(math.exp, chances)))
        assert all(parent < node for node, parent in enumerate(tree.parents))


def test_as_many_ids_as_nodes_are_enough() -> None:
    rows = marginals(3, 4, 40, sharp=0.3)
    for count in (1, 4, 9):
        cut, ids = likeliest(rows, count)
        assert best_tree(cut.tolist(), count) == best_tree(likeliest(rows, 40)[0].tolist(), count)
        assert torch.equal(rows.gather(1, ids), cut)
    assert likeliest(rows, 99)[0].shape == (4, 40)


def test_impossible_ids_and_empty_positions_end_the_tree() -> None:
    half = math.log(0.5)
    tree = best_tree([[half, half, -math.inf], [0.0, -math.inf]], 9)
    assert paths(tree) == [(0,), (0, 0), (1,), (1, 0)]
    assert best_tree([[0.0], []], 9).parents == [-1]
    assert best_tree([], 9).parents == best_tree([[0.0]], 0).parents == []
    for bad in ([half, 0.0], [0.1], [math.nan]):
        with pytest.raises(ArgumentError, match=r"log_probs\[1\]"):
            best_tree([[0.0], bad], 3)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make(target, num_nodes=None, **options):
    blocks = DFlashDrafter(
        target, tiny_block(target, "dflash"), num_pages=300, page_size=5, backend="reference"
    )
    return DDTreeDrafter(blocks, num_nodes, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_are_those_of_recomputed_marginals(target, temperature: float) -> None:
    batch = {
        name: (tokens, SamplingParams(temperature, seed=3, max_tokens=12))
        for name, (tokens, _) in prompts(4).items()
    }
    drafter = make(target, num_nodes=7, drawn=False)
    real, checked = drafter.propose, 0

    def propose(requests: list[DraftRequest]):
        nonlocal checked
        proposal = real(requests)
        by_name = {r.request_id: r for r in requests}
        for i, name in enumerate(proposal.request_ids):
            r, count = by_name[name], proposal.counts[i]
            if not count:
                continue
            rows = torch.stack(
                [
                    block_logits(target, drafter.blocks.draft, list(r.tokens), [0] * j)
                    for j in range(min(4, r.num_drafts))
                ]
            )
            values, ids = likeliest(torch.log_softmax(rows / (temperature or 1.0), -1), 7)
            want = best_tree(values.tolist(), min(7, r.num_nodes))
            tokens = [int(ids[a, b]) for a, b in zip(want.levels, want.ranks, strict=True)]
            assert proposal.tokens[i, :count].tolist() == tokens
            assert list(proposal.parents[i]) == want.parents
            checked += 1
        return proposal

    drafter.propose = propose
    _, history = run(target, batch, drafter, 9, make_step(target))
    assert checked > 20
    results = list(itertools.chain(*history))
    assert max(r.num_drafts for r in results) == 7
    assert any(r.path for r in results)


def test_sampled_requests_draw_from_the_marginals_without_replacement(target) -> None:
    """A greedy request beside them takes the likeliest ids of each position."""
    batch = {
        name: (tokens, SamplingParams(0.0 if name == "r0" else 0.7, seed=3, max_tokens=12))
        for name, (tokens, _) in prompts(4).items()
    }
    drafter = make(target)
    real, checked = drafter.propose, {"drawn": 0, "greedy": 0}

    def propose(requests: list[DraftRequest]):
        proposal = real(requests)
        by_name = {r.request_id: r for r in requests}
        for i, name in enumerate(proposal.request_ids):
            r, count = by_name[name], proposal.counts[i]
            if not count or proposal.probs is None:  # greedy requests alone get best trees
                continue
            shape = plan_tree(r.num_nodes, min(4, r.num_drafts))
            assert tuple(proposal.parents[i]) == shape.parents
            tokens, greedy = proposal.tokens[i, :count], r.sampling.temperature == 0
            for parent in {-1, *shape.parents}:
                children = [node for node in range(count) if shape.parents[node] == parent]
                level = len(shape.paths[children[0]]) - 1
                logits = block_logits(target, drafter.blocks.draft, list(r.tokens), [0] * level)
                if greedy:
                    want = logits.topk(len(children)).indices
                    assert torch.equal(tokens[children], want)
                else:
                    q = torch.softmax(logits / 0.7, -1)[None]
                    want = without_replacement(q, tokens[children][None])[0]
                    assert torch.allclose(proposal.probs[i, children], want, atol=1e-3)
                checked["greedy" if greedy else "drawn"] += len(children)
        return proposal

    drafter.propose = propose
    tokens, _ = run(target, batch, drafter, 9, make_step(target))
    assert checked["drawn"] > 100
    assert checked["greedy"] > 20
    assert tokens["r0"] == run(target, {"r0": batch["r0"]}, None, 4, make_step(target))[0]["r0"]


def test_greedy_loop_equals_plain(target) -> None:
    batch = prompts(6)
    plain, _ = run(target, batch, None, 4, make_step(target))
    drafter = make(target)
    tokens, history = run(target, batch, drafter, {"r1": 5, "r2": 12, "r4": 30}, make_step(target))
    assert tokens == plain
    drafted = {r.request_id: r.num_drafts for r in itertools.chain(*history[1:4])}
    assert drafted == {"r0": 0, "r1": 5, "r2": 12, "r3": 0, "r4": 30, "r5": 0}
    assert drafter.blocks.cache.blocks.num_free == 300  # nothing is left behind


def test_a_budget_below_one_is_refused(target) -> None:
    with pytest.raises(ArgumentError, match="num_nodes is 0"):
        make(target, num_nodes=0)
