"""Batch-invariant models on a GPU: routed experts, and prefixes found in the cache."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton")

from drafters.ngram import NgramDrafter
from specmla.config import MLAConfig
from specmla.errors import UnsupportedError
from specmla.generate import build_step, generate
from specmla.invariance import make_batch_invariant
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.grouped_experts import group_experts
from specmla.models.moe import DeepseekMoE, MoEConfig
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep
from tests.models.test_invariant_prefixes import Served, assert_as_alone, serve

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIMS = MLAConfig(1024, 16, 512, 128, 64, 128, q_lora_rank=512)
EXPERTS = MoEConfig(
    64, 6, 256, 1, 1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=8, topk_group=3,
    norm_topk_prob=True, routed_scaling_factor=2.5,
)  # fmt: skip
SOFTMAX = MoEConfig(64, 6, 256, n_shared_experts=1)
PAGE, VOCAB = 64, 1000
PROMPT = [(7 * i + 3) % VOCAB for i in range(261)]
"""Four pages and five tokens; NEW tokens more end behind the fifth page."""
NEW, FEW = 61, 6
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "loop"])
@pytest.mark.parametrize("config", [EXPERTS, SOFTMAX], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_experts_give_a_row_its_own_bits(
    dtype: torch.dtype, config: MoEConfig, grouped: bool
) -> None:
    """The plain form changes its tiles at 342 rows."""
    torch.manual_seed(2)
    layer = DeepseekMoE(1024, config).requires_grad_(False)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    layer = layer.to(DEVICE, dtype)
    make_batch_invariant(layer)
    if grouped:
        group_experts(layer)
    rows = torch.randn(700, 1024, device=DEVICE).to(dtype)
    whole = layer(rows)
    assert whole.isfinite().all()
    for first, count in ((0, 1), (699, 1), (63, 5), (300, 65), (100, 500)):
        part = slice(first, first + count)
        assert torch.equal(layer(rows[part].clone()), whole[part]), (first, count)
    order = torch.randperm(700, device=DEVICE)
    assert torch.equal(layer(rows[order]), whole[order])
    if grouped:
        rows[350:] = torch.nan
        assert torch.equal(layer(rows)[:350], whole[:350])


def test_experts_wait_for_nothing_and_can_be_captured() -> None:
    layer = model(torch.bfloat16).model.layers[1].mlp
    rows = torch.randn(20, 1024, device=DEVICE).bfloat16()
    eager = layer(rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(rows)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, eager)


@functools.cache
def model(dtype: torch.dtype) -> DeepseekForCausalLM:
    config = DeepseekConfig(DIMS, 3, VOCAB, 2048, 4096, moe=EXPERTS)
    made = DeepseekForCausalLM(config)
    made.reset_parameters(0.05, torch.Generator().manual_seed(4))
    made = made.requires_grad_(False).to(DEVICE, dtype)
    group_experts(made)
    make_batch_invariant(made)
    return made


def make_step(name: str, dtype: torch.dtype, *, caching: bool) -> VerifyStep:
    try:
        return build_step(
            model(dtype), num_pages=64, page_size=PAGE, backend=name, prefix_caching=caching
        )
    except UnsupportedError as error:
        pytest.skip(str(error))


@functools.cache
def alone(name: str, dtype: torch.dtype, prompt: tuple[int, ...], new: int) -> Served:
    step = make_step(name, dtype, caching=False)
    return serve(model(dtype), step, {"it": list(prompt)}, new)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_found_prefixes_give_the_bits_of_computed_ones(name: str, dtype: torch.dtype) -> None:
    """As the test of that name on the CPU, with drafts, in a model with experts."""
    step = make_step(name, dtype, caching=True)
    text = alone(name, dtype, tuple(PROMPT), NEW).tokens["it"]
    rounds: list[tuple[int, dict[str, tuple[list[int], int]]]] = [
        (NEW, {"first": (PROMPT, 0)}),
        (FEW, {
            "same": ([*PROMPT, 8], 256),
            "longer": ([*text, 1, 2, 3], 256),  # verifies wrote what follows
            "edge": (PROMPT[:257], 192),  # one token left would be a verify
        }),
        (FEW, {"again": ([*text, 9], 320), "other": ([*PROMPT[:130], 5, 4], 128), "one": ([3], 0)}),
    ]  # fmt: skip
    for new, requests in rounds:
        prompts = {key: prompt for key, (prompt, _) in requests.items()}
        want = {key: alone(name, dtype, tuple(prompt), new) for key, prompt in prompts.items()}
        truth = {key: each.tokens["it"] for key, each in want.items()}
        served = serve(model(dtype), step, prompts, new, truth)
        assert served.found == {key: found for key, (_, found) in requests.items()}
        assert_as_alone(served, want)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_captured_loops_with_prefixes_give_everyone_their_own_tokens(name: str) -> None:
    dtype, prompts = torch.bfloat16, {i: [*PROMPT[: 70 + 40 * i], i] for i in range(5)}
    step = make_step(name, dtype, caching=True)
    given = {i: (prompt, SamplingParams(max_tokens=20)) for i, prompt in prompts.items()}
    for _ in range(2):  # the second time all prefixes are found
        got = {i: list(prompt) for i, prompt in prompts.items()}
        drafter = NgramDrafter(VOCAB)
        for results in generate(model(dtype), step, given, drafter, 3, graphs=True):
            for result in results:
                got[result.request_id].extend(result.new_tokens)
        assert got == {
            i: alone(name, dtype, tuple(prompt), 20).tokens["it"] for i, prompt in prompts.items()
        }
    assert step.blocks.match(prompts[4]) == 192
