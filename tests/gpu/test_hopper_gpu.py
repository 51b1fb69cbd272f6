"""The Hopper backend on a real device: hostile cases, races, captured plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.hopper import HopperBackend
from specmla.testing import VerifyCase, check_backend, make_case

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0"),
]


def build(batch: Any, **options: Any) -> VerifyCase:
    return make_case(batch, **({"device": CUDA, "dtype": torch.bfloat16} | options))


@pytest.mark.timeout(600)
def test_hostile_cases(share: str) -> None:
    check_backend(HopperBackend(), device=CUDA, only=share).raise_if_failed()


@pytest.mark.parametrize("piece_keys", [128, 2048])
@pytest.mark.parametrize("only", ["^rows|^windows", "^mask|^repeats", "^contexts|^long|^heads-12"])
def test_batch_invariant_results(only: str, piece_keys: int) -> None:
    made = HopperBackend(batch_invariant=True, piece_keys=piece_keys)
    check_backend(made, device=CUDA, only=only).raise_if_failed()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("only", ["^alone", "^repeats"])
def test_thoroughly(only: str) -> None:
    """Requests by themselves around every block edge; a thousand repeats."""
    check_backend(HopperBackend(), device=CUDA, thorough=True, only=only).raise_if_failed()


@pytest.mark.parametrize("batch", ["32q4s2k", "8q1-8s4k"])
def test_repeats_are_equal_to_the_bit(batch: str) -> None:
    case = build(batch)
    backend = HopperBackend()
    part = case.planned(backend)
    first: AttentionOutput | None = None
    for _ in range(1000):
        got = backend.forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
        )
        first = first or got
        assert torch.equal(got.out, first.out)
        assert torch.equal(got.lse, first.lse)


def test_a_captured_plan_follows_the_lengths() -> None:
    case = build([(4, 5000), (4, 300)])
    backend = HopperBackend()
    part = case.tables()

    def step() -> AttentionOutput:
        planned = backend.plan(part, num_heads=16, kv_lora_rank=512)
        return backend.forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, planned, softmax_scale=0.1
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    part.seq_lens.copy_(torch.tensor([700, 299], device=CUDA))
    extents = [697, 698, 699, 700, 296, 297, 298, 299]
    part.row_extent.copy_(torch.tensor(extents, device=CUDA))
    graph.replay()
    eager = step()
    assert torch.equal(captured.out, eager.out)
    assert torch.equal(captured.lse, eager.lse)
