"""Steps of trees as real CUDA graphs: bit-equal to the same calls without one."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from drafters import DraftModelTreeDrafter
from specmla import DraftProposal, SamplingParams, build_step, generate
from specmla.backends.hopper import HopperBackend
from specmla.backends.triton import TritonBackend
from specmla.bucket import Bucket
from specmla.verify.captured import CapturedStep
from tests.gpu.test_graphs_gpu import (
    FILTERED,
    GREEDY,
    SAMPLED,
    VOCAB,
    forward_of,
    needs_hopper,
    pool_bits,
    started,
    tiny,
    without_graphs,
)
from tests.verify.test_captured_trees import random_parents

pytestmark = pytest.mark.gpu

NODES = 12
BACKENDS = [
    pytest.param(TritonBackend, id="triton"),
    pytest.param(HopperBackend, id="hopper", marks=needs_hopper),
]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def propose(names, seed: int, *, probs: bool) -> DraftProposal:
    """Trees, chains and none, of few tokens, so that siblings meet."""
    rng = random.Random(seed)
    counts = [rng.randint(0, NODES) for _ in names]
    width = max([1, *counts])
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (len(names), width)
    tokens = torch.randint(8, shape, generator=generator, device="cuda")
    rows = torch.rand(*shape, VOCAB, generator=generator, device="cuda")
    rows = rows / rows.sum(-1, keepdim=True)
    parents = tuple(None if rng.random() < 0.2 else random_parents(rng, n) for n in counts)
    return DraftProposal(tuple(names), tuple(counts), tokens, rows if probs else None, parents)


@pytest.mark.parametrize("kinds", [[GREEDY] * 4, [GREEDY, SAMPLED, FILTERED, SAMPLED]],
                         ids=["greedy", "mixed"])  # fmt: skip
@pytest.mark.parametrize("make", BACKENDS)
def test_replays_of_trees_equal_eager_to_the_bit(make, kinds, monkeypatch):
    model, lengths = tiny(torch.bfloat16), [1, 62, 64, 700]
    ours, eager = (started(model, make(), lengths, kinds) for _ in range(2))
    buckets = [Bucket(8, 1 + NODES, trees=True)]
    options = {"sampling": list(dict.fromkeys(kinds)), "draft_probs": None}
    graphs = CapturedStep(ours, forward_of(model, ours), buckets, **options)
    calls = without_graphs(monkeypatch, eager, forward_of(model, eager), buckets, **options)
    for turn, names in enumerate([[0, 1, 2, 3], [0, 3], [3, 1, 0, 2]] * 3):
        verdicts = []
        for runner in (graphs, calls):
            proposal = propose(names, turn, probs=turn % 2 == 1)
            verdict = runner.run(proposal, names)
            verdicts.append((verdict.wait(), runner.step.commit(verdict.plan, verdict)))
        assert verdicts[0] == verdicts[1]
        assert torch.equal(pool_bits(ours), pool_bits(eager))


@pytest.mark.parametrize("kinds", [[GREEDY] * 3, [SAMPLED] * 3], ids=["greedy", "sampled"])
def test_replays_of_trees_decide_as_a_plain_step(kinds):
    """In float32, where other tiles and other splits can't turn a choice."""
    model, lengths = tiny(torch.float32), [5, 62, 300]
    ours, plain = (started(model, TritonBackend(), lengths, kinds) for _ in range(2))
    graphs = CapturedStep(
        ours,
        forward_of(model, ours),
        [Bucket(4, 1 + NODES, trees=True)],
        sampling=kinds[:1],
        draft_probs=None,
    )
    for turn in range(8):
        plan = plain.plan(propose(range(3), turn, probs=turn % 2 == 1))
        expected = plain.commit(plan, plain.verify(plan, forward_of(model, plain)(plan)))
        verdict = graphs.run(propose(range(3), turn, probs=turn % 2 == 1))
        assert ours.commit(verdict.plan, verdict) == expected


def test_the_loop_gives_the_same_tokens():
    model, draft, runs = tiny(torch.float32), tiny(torch.float32, seed=3), []
    generator = torch.Generator().manual_seed(1)
    batch = {
        i: (
            torch.randint(VOCAB, (5 + 20 * i,), generator=generator).tolist(),
            SamplingParams(0.7 * (i % 2), seed=i, max_tokens=40),
        )
        for i in range(3)
    }
    for graphs in (False, True):
        step = build_step(model, num_pages=64, backend="triton", max_seq_len=512)
        drafter = DraftModelTreeDrafter(draft, num_pages=64, backend="triton")
        tokens: dict[int, list[int]] = {i: [] for i in batch}
        for results in generate(model, step, batch, drafter, 12, graphs=graphs):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        runs.append(tokens)
    assert runs[0] == runs[1]
