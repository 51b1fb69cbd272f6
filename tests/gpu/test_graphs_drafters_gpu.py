"""Drafters as real CUDA graphs: bit-equal to the same calls without one, nothing that waits."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from drafters import DraftModelDrafter, Eagle3Drafter
from specmla import Bucket, DraftRequest, SamplingParams, build_step, generate
from specmla.bench.__main__ import main
from specmla.verify import draft_graphs
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.networks import tiny_target
from tests.e2e.conftest import prompts
from tests.gpu.test_drafters_gpu import make
from tests.gpu.test_graphs_gpu import VOCAB, pool_bits, tiny

pytestmark = pytest.mark.gpu

KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


def batch_of(count: int, max_tokens: int = 40, **sampling) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        i: (
            torch.randint(VOCAB, (1 + 21 * i,), generator=generator).tolist(),
            SamplingParams(seed=i, max_tokens=max_tokens + 7 * i, **sampling),
        )
        for i in range(count)
    }


def requests_of(lengths, counts, **sampling) -> list[DraftRequest]:
    generator = torch.Generator().manual_seed(2)
    return [
        DraftRequest(
            i,
            torch.randint(VOCAB, (n,), generator=generator).tolist(),
            count,
            SamplingParams(seed=i, **sampling),
        )
        for i, (n, count) in enumerate(zip(lengths, counts, strict=True))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replays_of_a_draft_model_equal_its_calls_to_the_bit(kind, dtype, monkeypatch):
    """Over a page's edge, fewer drafts for some, a request that is behind; cache rows as well."""
    model, found = tiny(dtype), []
    params = SamplingParams(seed=1, **KINDS[kind])
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr(draft_graphs, "record", lambda call, device, pool=None: call)
        drafter = DraftModelDrafter(model, num_pages=40, backend="triton")
        for i in range(drafter.cache.num_layers):
            drafter.cache.layer(i).zero_()
        drafter.capture([Bucket(4, 5), Bucket(8, 4)], [params])
        parts = []
        for turn in range(4):
            lengths = [1 + turn, 61 + turn, 63 + turn, 200 + 2 * turn]
            proposal = drafter.propose(requests_of(lengths, [4, 4, 2, 3], **KINDS[kind]))
            assert proposal.request_ids == (0, 1, 3, 2)
            parts.append(proposal.tokens)
            if proposal.probs is not None:
                parts += [proposal.probs[i, :n] for i, n in enumerate(proposal.counts)]
            for name in range(4):  # what `observe` does when nothing stands but the anchor
                tokens = drafter._tokens[name]
                drafter.blocks.commit(name, len(tokens), tokens)
        found.append((parts, pool_bits(drafter)))
    for ours, eager in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(ours, eager)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_gives_the_tokens_of_host_driven_drafts(kind):
    """In float32, where other tiles and other splits can't turn a choice."""
    model, draft, runs = tiny(torch.float32), tiny(torch.float32, seed=3), []
    batch = batch_of(5, **KINDS[kind])
    for graphs in (False, True):
        step = build_step(model, num_pages=64, backend="triton", max_seq_len=512)
        drafter = DraftModelDrafter(draft, num_pages=64, backend="triton")
        tokens: dict[int, list[int]] = {i: [] for i in batch}
        for results in generate(model, step, batch, drafter, 4, graphs=graphs):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        runs.append(tokens)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_captured_proposal_waits_for_nothing_and_grows_nothing(kind):
    model = tiny(torch.bfloat16)
    drafter = DraftModelDrafter(model, num_pages=64, backend="triton")
    drafter.capture([Bucket(4, 5)], [SamplingParams(seed=1, **KINDS[kind])])
    requests = requests_of([5, 70, 130], [4, 4, 4], **KINDS[kind])
    drafter.propose(requests)
    reserved = 0
    for turn in range(20):
        for name in range(3):
            tokens = drafter._tokens[name]
            drafter.blocks.commit(name, len(tokens), tokens)
        requests = [r._replace(tokens=[*r.tokens, turn]) for r in requests]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            drafter.propose(requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reserved = reserved if turn > 2 else torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved


def test_the_benchmark_captures_the_shipped_pair(tmp_path):
    """Its backend can be captured, at its own widths, and what is timed are replays."""
    file = tmp_path / "decode.json"
    words = ["decode", "--batches", "2", "--turns", "1", "--max-tokens", "24", "--json", str(file)]
    assert main(words) == 0
    rows = json.loads(file.read_text())["rows"]
    names = ["plain", "plain ahead", "ngram", "ngram ahead", "draft_model"]
    assert [r["drafter"] for r in rows] == names * 2
    for row in rows:
        assert row["captured"]
        assert row["host_us"] > 0
        assert row["tokens_per_step"] >= 1
    assert all(r["tokens_per_step"] > 1.5 for r in rows if r["drafter"] == "draft_model")


STATE_KINDS = ("mtp", "eagle3", "dflash", "dspark")


def make_states_drafter(kind: str):
    """A target, its step and a drafter on its states."""
    if kind != "eagle3":
        return make(kind, "cuda")
    target = tiny_target().to("cuda")
    step = build_step(target, num_pages=100, page_size=16)
    return target, step, Eagle3Drafter(
        target, tiny_eagle3(target).to("cuda"), num_pages=60, page_size=32
    )  # fmt: skip


def proposals_of(kind: str, graphs: bool, **sampling) -> tuple[dict, list]:
    """Tokens by request, and every proposal."""
    target, step, drafter = make_states_drafter(kind)
    real, proposals = drafter.propose, []

    def propose(requests):
        proposals.append(real(requests))
        return proposals[-1]

    drafter.propose = propose
    tokens: dict = {}
    batch = prompts(5, **sampling)
    for results in generate(target, step, batch, drafter, 4, graphs=graphs):
        for r in results:
            tokens.setdefault(r.request_id, []).extend(r.new_tokens)
    return tokens, proposals


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_drafters_on_states_draft_the_same_by_graphs(kind, temperature):
    wanted, plain = proposals_of(kind, False, temperature=temperature)
    tokens, ours = proposals_of(kind, True, temperature=temperature)
    assert tokens == wanted
    for got, want in zip(ours, plain, strict=True):
        assert (got.request_ids, got.counts) == (want.request_ids, want.counts)
        assert torch.equal(got.tokens, want.tokens)


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_replays_of_drafters_on_states_equal_their_calls_to_the_bit(kind, monkeypatch):
    tokens, ours = proposals_of(kind, True, temperature=0.8)
    monkeypatch.setattr(draft_graphs, "record", lambda call, device, pool=None: call)
    wanted, plain = proposals_of(kind, True, temperature=0.8)
    assert tokens == wanted
    for got, want in zip(ours, plain, strict=True):
        assert torch.equal(got.tokens, want.tokens)
        probs = [
            p if isinstance(p, torch.Tensor | None) else p.probs for p in (got.probs, want.probs)
        ]
        for i, count in enumerate(got.counts if probs[0] is not None else ()):
            assert torch.equal(probs[0][i, :count], probs[1][i, :count])


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_captured_drafters_on_states_wait_for_nothing(kind):
    target, step, drafter = make_states_drafter(kind)
    real, guarded = drafter.propose, []

    def propose(requests):
        if not any(len(r.tokens) > 8 for r in requests):  # prompts are run before the graph
            return real(requests)
        guarded.append(len(requests))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    drafter.propose = propose
    batch = {
        i: ([3, 1, 4, 1], SamplingParams(temperature=float(i), seed=i, max_tokens=20))
        for i in range(2)
    }
    for _ in generate(target, step, batch, drafter, 3, graphs=True):
        pass
    assert guarded
