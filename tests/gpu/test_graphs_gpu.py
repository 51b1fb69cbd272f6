"""Captured steps as real CUDA graphs: bit-equal to the same calls without one, padding inert."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import specmla.verify.captured as captured_module
from drafters import DraftModelDrafter, NgramDrafter
from specmla import (
    DeepseekConfig,
    DeepseekForCausalLM,
    DraftProposal,
    MLAConfig,
    SamplingParams,
    UnsupportedError,
    VerifyStep,
    build_step,
    generate,
    group_experts,
)
from specmla.backends.base import AttentionBackend
from specmla.backends.hopper import HopperBackend
from specmla.backends.rows import RowsBackend
from specmla.backends.triton import TritonBackend
from specmla.bucket import Bucket
from specmla.capture import CapturedMetadata
from specmla.metadata import RequestKind, RequestRows
from specmla.models.moe import MoEConfig
from specmla.verify.captured import CapturedStep
from specmla.verify.captured_graph import record
from specmla.verify.plan import StepPlan

pytestmark = pytest.mark.gpu

VOCAB = 512
ROOT = Path(__file__).parents[2]
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
BACKENDS = [
    pytest.param(TritonBackend, torch.bfloat16, id="triton"),
    pytest.param(RowsBackend, torch.bfloat16, id="rows"),
    pytest.param(HopperBackend, torch.bfloat16, id="hopper", marks=needs_hopper),
]
GREEDY = SamplingParams(max_tokens=300)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=300)
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=6, max_tokens=300)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def tiny(dtype: torch.dtype, seed: int = 0) -> DeepseekForCausalLM:
    torch.manual_seed(seed)
    attention = MLAConfig(
        hidden_size=256,
        num_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=48,
    )
    model = DeepseekForCausalLM(DeepseekConfig(attention, 2, VOCAB, 512, 1024))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.06)
    return model.eval().to("cuda", dtype)


def forward_of(model: DeepseekForCausalLM, step: VerifyStep) -> Callable[[StepPlan], torch.Tensor]:
    def forward(plan: StepPlan) -> torch.Tensor:
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        return model.logits(hidden[plan.logit_rows])

    return forward


def started(model, backend: AttentionBackend, lengths, kinds) -> VerifyStep:
    """A step whose requests have prompts of these lengths behind them."""
    step = build_step(model, num_pages=96, page_size=64, backend=backend, max_seq_len=1024)
    for i in range(step.cache.num_layers):
        step.cache.layer(i).zero_()
    for i, (length, sampling) in enumerate(zip(lengths, kinds, strict=True)):
        generator = torch.Generator().manual_seed(i)
        step.add(i, torch.randint(VOCAB, (length,), generator=generator).tolist(), sampling)
    plan = step.plan()
    step.commit(plan, step.verify(plan, forward_of(model, step)(plan)))
    return step


def propose(step: VerifyStep, counts: dict[int, int], seed: int, *, probs: bool) -> DraftProposal:
    width = max(counts.values())
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(VOCAB, (len(counts), width), generator=generator, device="cuda")
    rows = torch.rand(len(counts), width, VOCAB, generator=generator, device="cuda")
    rows = rows / rows.sum(-1, keepdim=True)
    return DraftProposal(tuple(counts), tuple(counts.values()), tokens, rows if probs else None)


def pool_bits(step: VerifyStep) -> torch.Tensor:
    """The bits of all rows, [L, N * G, A]."""
    layers = [step.cache.layer(i).flatten(0, 1) for i in range(step.cache.num_layers)]
    pool = torch.stack(layers)
    return pool.view(torch.int16 if pool.element_size() == 2 else torch.int32)


def without_graphs(monkeypatch: pytest.MonkeyPatch, *args, **options) -> CapturedStep:
    """The same object, whose replays call the function: eager, over the same kind of buffers."""
    with monkeypatch.context() as patch:
        patch.setattr(captured_module, "record", lambda call, device, pool=None: call)
        return CapturedStep(*args, **options)


@pytest.mark.parametrize("kinds", [[GREEDY] * 5, [GREEDY, SAMPLED, FILTERED, GREEDY, SAMPLED]],
                         ids=["greedy", "mixed"])  # fmt: skip
@pytest.mark.parametrize(("make", "dtype"), BACKENDS)
def test_ragged_replays_equal_eager_to_the_bit(make, dtype, kinds, monkeypatch):  # BL-20
    """Five of eight, lengths around a page's edge; batches shrink, grow and come again."""
    model, lengths = tiny(dtype), [1, 62, 64, 700, 65]
    ours, eager = (started(model, make(), lengths, kinds) for _ in range(2))
    buckets = [Bucket(8, 5), Bucket(2, 4)]
    options = {"sampling": list(dict.fromkeys(kinds)), "draft_probs": None}
    graphs = CapturedStep(ours, forward_of(model, ours), buckets, **options)
    calls = without_graphs(monkeypatch, eager, forward_of(model, eager), buckets, **options)
    # Every mix of kinds that occurs must have been captured: take all or one of a kind.
    rng, subsets = random.Random(1), [[0, 1, 2, 3, 4], [0, 3], [0], [4, 2, 1, 0, 3]]
    for turn, names in enumerate(subsets * 3):
        counts = {n: rng.randint(0, 4 if len(names) > 2 else 3) for n in names}
        verdicts = []
        for runner in (graphs, calls):
            proposal = propose(runner.step, counts, turn, probs=turn % 2 == 1)
            verdict = runner.run(proposal, names)
            verdicts.append((verdict.wait(), runner.step.commit(verdict.plan, verdict)))
        assert verdicts[0] == verdicts[1]
        assert torch.equal(pool_bits(ours), pool_bits(eager))


@pytest.mark.parametrize(("make", "dtype"), BACKENDS)
def test_uniform_replays_follow_their_slots(make, dtype, monkeypatch):  # BL-18
    """Rows over a page's edge; whatever is no new row of a replay keeps its bits."""
    model, lengths = tiny(dtype), [59, 62, 65]
    ours, eager = (started(model, make(), lengths, [GREEDY] * 3) for _ in range(2))
    before = pool_bits(ours)
    bucket = Bucket(3, 3, ragged=False)
    graphs = CapturedStep(ours, forward_of(model, ours), [bucket])
    assert torch.equal(pool_bits(ours), before), "a capture writes nothing"
    calls = without_graphs(monkeypatch, eager, forward_of(model, eager), [bucket])
    for turn in range(3):
        before, counts = pool_bits(ours), dict.fromkeys(range(3), 2)
        verdicts = []
        for runner in (graphs, calls):
            verdict = runner.run(propose(runner.step, counts, turn, probs=False))
            slots = verdict.plan.metadata.slot_mapping.clone()
            verdicts.append(runner.step.commit(verdict.plan, verdict))
        assert verdicts[0] == verdicts[1]
        after = pool_bits(ours)
        assert torch.equal(after, pool_bits(eager))
        assert int((slots >= 0).sum()) == 9
        before[:, slots] = after[:, slots]
        assert torch.equal(after, before)


def test_weights_written_in_place_hold_for_replays(monkeypatch):
    """What `reload_checkpoint` does: addresses stay, graphs compute with the new weights."""
    model = tiny(torch.bfloat16)
    ours, eager = (started(model, TritonBackend(), [30, 65], [GREEDY] * 2) for _ in range(2))
    graphs = CapturedStep(ours, forward_of(model, ours), [Bucket(2, 4)])
    calls = without_graphs(monkeypatch, eager, forward_of(model, eager), [Bucket(2, 4)])
    for turn in range(3):
        for weight in model.parameters():
            weight.mul_(-1.01 if weight.dim() > 1 else 1.5)
        verdicts = []
        for runner in (graphs, calls):
            verdict = runner.run(propose(runner.step, {0: 3, 1: 2}, turn, probs=False))
            verdicts.append(runner.step.commit(verdict.plan, verdict))
        assert verdicts[0] == verdicts[1]
        assert torch.equal(pool_bits(ours), pool_bits(eager))


@pytest.mark.parametrize("kinds", [[GREEDY] * 3, [SAMPLED] * 3], ids=["greedy", "sampled"])
def test_replays_decide_as_a_plain_step(kinds):
    """In float32, where other tiles and other splits can't turn a choice."""
    model, lengths = tiny(torch.float32), [5, 62, 300]
    ours, plain = (started(model, TritonBackend(), lengths, kinds) for _ in range(2))
    graphs = CapturedStep(
        ours, forward_of(model, ours), [Bucket(4, 5)], sampling=kinds[:1], draft_probs=True
    )
    for turn in range(8):
        counts = {n: (turn + n) % 5 for n in range(3)}
        plan = plain.plan(propose(plain, counts, turn, probs=True))
        expected = plain.commit(plan, plain.verify(plan, forward_of(model, plain)(plan)))
        verdict = graphs.run(propose(ours, counts, turn, probs=True))
        assert ours.commit(verdict.plan, verdict) == expected


@pytest.mark.parametrize(("make", "dtype"), BACKENDS)
def test_nothing_waits_and_nothing_grows(make, dtype):
    model = tiny(dtype)
    step = started(model, make(), [30, 62, 200], [SAMPLED] * 3)
    graphs = CapturedStep(
        step, forward_of(model, step), [Bucket(4, 5)], sampling=[SAMPLED], draft_probs=True
    )
    reserved = 0
    for turn in range(20):
        proposal = propose(step, dict.fromkeys(range(3), 4), turn, probs=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn >= 4 else "default")
        try:
            verdict = graphs.run(proposal)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step.commit(verdict.plan, verdict)
        reserved = reserved if turn > 4 else torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_the_loop_gives_the_same_tokens(drafter):
    model = tiny(torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        i: (torch.randint(VOCAB, (5 + 20 * i,), generator=generator).tolist(), kind)
        for i, kind in enumerate([GREEDY, SAMPLED, GREEDY])
    }
    prompts = {i: (p, SamplingParams(s.temperature, seed=i, max_tokens=50 + 9 * i))
               for i, (p, s) in prompts.items()}  # fmt: skip
    runs = []
    for graphs in (False, True):
        step = build_step(model, num_pages=64, backend="triton", max_seq_len=512)
        made = (
            DraftModelDrafter(model, num_pages=64, backend="triton")
            if drafter == "model"
            else NgramDrafter(VOCAB, prompt_lookup_min=1)
        )
        tokens: dict[int, list[int]] = {i: [] for i in prompts}
        for results in generate(model, step, prompts, made, 4, graphs=graphs):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        runs.append(tokens)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("make", "dtype"), BACKENDS)
def test_rows_drafted_in_one_graph_equal_eager_ones(make, dtype):
    """Four rounds of a model on its own tokens; the third request drafts but one."""
    model, ahead = tiny(dtype), [3, 3, 1]
    step = started(model, make(), [30, 62, 127], [GREEDY] * 3)
    step.blocks.reserve(dict.fromkeys(range(3), 4))
    tables = CapturedMetadata(step.builder, Bucket(4, 1), {"anchors": 4})

    def call() -> torch.Tensor:
        tokens, rounds = tables.along["anchors"], []
        for _ in range(4):
            metadata = tables.for_capture()
            hidden = model(tokens, metadata, step.cache, step.builder.backend)
            tokens = model.logits(hidden).argmax(-1)
            rounds.append(tokens)
            tables.advance()
        return torch.stack(rounds)

    before = pool_bits(step)
    replay = record(call, step.builder.device)
    assert torch.equal(pool_bits(step), before), "a capture writes nothing"
    requests = [
        RequestRows(RequestKind.VERIFY, 1, len(step.tokens(i)), step.blocks.block_ids(i))
        for i in range(3)
    ]
    anchors = array("q", [step.tokens(i)[-1] for i in range(3)] + [0])
    found = []
    for run in (call, replay, replay):
        tables.for_replay(requests, {"anchors": anchors}, ahead)
        drafted = run()[:, :3].clone()
        drafted[2:, 2] = -1  # it stood still: what the row gives is nobody's
        found.append((drafted, pool_bits(step)))
    for drafted, pool in found[1:]:
        assert torch.equal(drafted, found[0][0])
        assert torch.equal(pool, found[0][1])
    assert int((found[0][1] != before).any(-1).sum()) == 2 * (4 + 4 + 2)


WAITS = """
import torch
from tests.gpu.test_graphs_gpu import *

torch.set_grad_enabled(False)
step = started(tiny(torch.bfloat16), TritonBackend(), [30], [GREEDY])


def waiting(plan):
    return torch.zeros(plan.logit_rows.shape[0], VOCAB, device="cuda") + plan.drafts.sum().item()


try:
    CapturedStep(step, waiting, [Bucket(1, 3)])
except RuntimeError as error:
    print("refused:", error)
"""


def test_a_forward_that_waits_for_the_device_can_not_be_captured():
    """In a process of its own: a broken capture may leave the device's context broken."""
    done = subprocess.run(
        [sys.executable, "-c", WAITS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr


def test_experts_are_captured_once_they_are_grouped():
    experts = MoEConfig(8, 3, 48, n_shared_experts=1, topk_method="noaux_tc", n_group=2)
    config = dataclasses.replace(tiny(torch.float32).config, moe=experts)
    torch.manual_seed(0)
    model = DeepseekForCausalLM(config).to("cuda").eval()
    model.reset_parameters(0.06, torch.Generator("cuda").manual_seed(0))
    given = {0: ([1, 2, 3], GREEDY), 1: ([5, 4, 3, 2, 1], GREEDY)}
    given = {i: (p, SamplingParams(max_tokens=40)) for i, (p, _) in given.items()}
    runs: list[dict[int, list[int]]] = []

    def collect(graphs: bool) -> None:
        step = build_step(model, num_pages=16, backend="triton", max_seq_len=256)
        drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
        tokens: dict[int, list[int]] = {i: [] for i in given}
        for results in generate(model, step, given, drafter, graphs=graphs):
            for r in results:
                tokens[r.request_id] += r.new_tokens
        runs.append(tokens)

    with pytest.raises(UnsupportedError, match="group_experts"):
        collect(True)
    collect(False)
    assert group_experts(model) == 2
    collect(False)
    collect(True)
    assert runs[0] == runs[1] == runs[2]
