"""Adapters on a GPU: backends with fixed heads, and FlashMLA's operator where it is installed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.flashmla import FlashMLABackend
from specmla.backends.select import get_backend
from specmla.bench.verify import requirements
from specmla.testing import VerifyCase, check_backend, make_case

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FEW = "^(contexts|no-|repeats-one|rows|slice|heads-(1|12|63|128)$|refuses-num_heads)"


def build(batch: str) -> VerifyCase:
    return make_case(batch, num_heads=12, page_size=64, dtype=torch.bfloat16, device=CUDA)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["triton", "rows", "hopper"])
def test_fixed_heads(name: str) -> None:
    backend = FixedHeads(get_backend(name))
    if reasons := backend.problems(requirements(build("2q1s70"))):
        pytest.skip("; ".join(reasons))
    report = check_backend(backend, device=CUDA, dtypes=[torch.bfloat16], only=FEW)
    report.raise_if_failed()
    assert {"heads-1", "heads-128", "rows"} <= set(report.passed)


@pytest.fixture
def flashmla() -> FlashMLABackend:
    backend = FlashMLABackend()
    if reasons := backend.problems(requirements(build("2q1s70"))):
        pytest.skip("; ".join(reasons))
    return backend


@pytest.mark.timeout(600)
def test_flashmla(flashmla: FlashMLABackend) -> None:
    check_backend(flashmla, device=CUDA).raise_if_failed()


def test_a_captured_step_schedules_anew_at_every_replay(flashmla: FlashMLABackend) -> None:
    case = build("4q2s700")
    part = case.planned(flashmla)

    def step() -> AttentionOutput:
        """Plan, then two layers."""
        planned = flashmla.plan(part, num_heads=12, kv_lora_rank=512)
        query = case.q_latent, case.q_rope, case.latent_cache, planned
        flashmla.forward_mqa(*query, softmax_scale=case.softmax_scale)
        return flashmla.forward_mqa(*query, softmax_scale=case.softmax_scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    part.seq_lens.copy_(torch.tensor([60, 700, 2, 400]))
    part.row_extent.copy_(torch.tensor([59, 60, 699, 700, 1, 2, 399, 400]))
    graph.replay()
    eager = step()
    assert not eager.out.isnan().any()
    assert torch.equal(captured.out, eager.out)
    assert torch.equal(captured.lse, eager.lse)
