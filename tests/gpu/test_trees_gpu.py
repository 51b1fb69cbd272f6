"""Trees on a GPU: every path as its own chain, the loop, no waiting from plan to verify."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla import DeepseekForCausalLM, SamplingParams, build_step, generate
from specmla.backends.base import AttentionBackend
from specmla.backends.hopper import HopperBackend
from specmla.backends.triton import TritonBackend
from specmla.cache import cache_format
from specmla.cli.difference import first_difference
from specmla.mask import DraftMask
from specmla.testing import make_case
from tests.e2e.conftest import VOCAB
from tests.e2e.test_trees import TreeDrafter, hidden_path
from tests.gpu.test_step_gpu import forward, prompts, tiny
from tests.tree_paths import assert_paths_are_chains

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BATCHES = {
    "ragged": [(1, 1), (5, 90), (0, 6), (17, 700), (7, 7), (64, 300)],
    "sixteen": [(16, 2000)] * 4,
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("heads", [12, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_paths_are_chains(name: str, heads: int, dtype: torch.dtype) -> None:
    case = make_case(
        BATCHES[name], num_heads=heads, mask=DraftMask.TREE, dtype=dtype, device=CUDA, page_gap=64
    )
    assert_paths_are_chains(case, TritonBackend())


@pytest.mark.parametrize("make", [TritonBackend, HopperBackend])
@pytest.mark.parametrize("name", BATCHES)
def test_batch_invariant_paths_are_chains(name: str, make: Any) -> None:
    if make is HopperBackend and not IS_HOPPER:
        pytest.skip("needs compute capability 9.0")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    case = make_case(BATCHES[name], num_heads=16, mask=DraftMask.TREE, **options)
    assert_paths_are_chains(case, make(batch_invariant=True))


@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head"])
def test_quantised_paths_are_chains(name: str) -> None:
    form = cache_format(name, 512, 64, dtype=torch.bfloat16)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA, "cache_format": form}
    case = make_case(BATCHES["ragged"], num_heads=16, mask=DraftMask.TREE, **options)
    assert_paths_are_chains(case, TritonBackend(cache_format=form))


@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("heads", [12, 16, 128])
def test_hopper_paths_are_chains(name: str, heads: int) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    case = make_case(BATCHES[name], num_heads=heads, mask=DraftMask.TREE, **options)
    assert_paths_are_chains(case, HopperBackend())


def guesses(tokens: list[int], num_nodes: int, num_levels: int) -> list[tuple[int, int]]:
    """Propose what followed the last token before, and some noise, children before parents."""
    last = tokens[-1]
    seen = [tokens[i + 1] for i in range(len(tokens) - 1) if tokens[i] == last][-2:]
    first = [*seen, (last * 7 + 1) % VOCAB, (last * 5 + 2) % VOCAB][:2]
    if num_nodes < 4 or num_levels < 2:
        return []
    return [(first[1], 3), (first[0], 2), (first[0], -1), (first[0] + 1, -1)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nothing_waits_from_plan_to_verify(temperature: float) -> None:
    model = tiny(2, torch.bfloat16)
    step = build_step(model, num_pages=64, backend="triton")
    drafter = TreeDrafter(guesses, vocab_size=step.vocab_size)
    for i, prompt in enumerate(prompts(4)):
        step.add(i, prompt, SamplingParams(temperature, top_p=0.9, seed=i, max_tokens=60))
    with torch.no_grad():
        for turn in range(8):
            wanted = step.draft_requests(8)
            proposal = drafter.propose(wanted) if wanted else None
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if turn >= 4 else "default")
            try:
                plan = step.plan(proposal)
                verdict = step.verify(plan, forward(model, step, plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            results = step.commit(plan, verdict)
            assert turn == 0 or all(r.path is not None for r in results)


@pytest.mark.parametrize(
    ("backend", "dtype", "margin"),
    [(TritonBackend, torch.float32, 1e-4), (HopperBackend, torch.bfloat16, 6e-2)],
)
def test_greedy_loop_equals_plain_up_to_rounding_ties(
    backend: type[AttentionBackend], dtype: torch.dtype, margin: float
) -> None:
    """Trees that hold the plain continuation, up to a random depth, in a random node order."""
    if backend is HopperBackend and not IS_HOPPER:
        pytest.skip("needs compute capability 9.0")
    dims = (512, 64) if backend is HopperBackend else (128, 32)
    model, batch = tiny(3, dtype, 0, *dims), prompts(5)
    plain = run_batch(model, backend(), batch, None)[0]
    known = [prompt + new for prompt, new in zip(batch, plain, strict=True)]

    def continuation(tokens: list[int]) -> list[int]:
        whole = next((w for w in known if w[: len(tokens)] == tokens), None)
        return [0] * 8 if whole is None else whole[len(tokens) :]

    drafter = TreeDrafter(hidden_path(continuation, 3), vocab_size=model.config.vocab_size)
    got, deepest = run_batch(model, backend(), batch, drafter)
    difference = first_difference(model, batch, plain, got)
    assert difference is None or difference.top1_margin <= margin
    assert deepest >= 4


def run_batch(
    model: DeepseekForCausalLM,
    backend: AttentionBackend,
    batch: list[list[int]],
    drafter: TreeDrafter | None,
) -> tuple[list[list[int]], int]:
    """Give 48 greedy tokens for each prompt and the longest path that was accepted."""
    step = build_step(model, num_pages=64, backend=backend)
    sampling = SamplingParams(max_tokens=48)
    named = {i: (prompt, sampling) for i, prompt in enumerate(batch)}
    tokens: list[list[int]] = [[] for _ in batch]
    deepest = 0
    for results in generate(model, step, named, drafter, 16):
        step.blocks.check_integrity()
        for r in results:
            tokens[int(str(r.request_id))] += r.new_tokens
            deepest = max(deepest, r.num_accepted)
    return tokens, deepest
