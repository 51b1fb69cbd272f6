"""The Hopper backend over e4m3 caches on a real device: hostile cases, scales, repeats."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.hopper import HopperBackend
from specmla.cache import cache_format
from specmla.testing import check_backend, make_case
from tests.gpu.conftest import REST

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0"),
    pytest.mark.timeout(600),
]


def made(dtype: torch.dtype = torch.bfloat16, scale: float = 3 * 2.0**-8) -> HopperBackend:
    return HopperBackend(cache_format=cache_format("fp8", 512, 64, dtype=dtype, k_scale=scale))


def test_hostile_cases(share: str) -> None:
    report = check_backend(made(), device=CUDA, only=share)
    if report.num_run or share != REST:  # quantised backends have no cases of their own beyond
        report.raise_if_failed()


@pytest.mark.parametrize("scale", [1.0, 2.0**-6])
def test_float16(scale: float) -> None:
    only = "^(rows|decodes|totals|repeats-many|heads-3$)"
    check_backend(made(torch.float16, scale), device=CUDA, only=only).raise_if_failed()


@pytest.mark.parametrize("batch", ["32q1s8k", "32q2s2k", "8q1-8s4k"])
def test_repeats_are_equal_to_the_bit(batch: str) -> None:
    backend = made()
    case = make_case(batch, device=CUDA, dtype=torch.bfloat16, cache_format=backend.cache_format)
    part = case.planned(backend)
    runs = [
        backend.forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
        )
        for _ in range(300)
    ]
    assert all(torch.equal(got.out, runs[0].out) for got in runs)
    assert all(torch.equal(got.lse, runs[0].lse) for got in runs)


def test_a_captured_plan_follows_the_lengths() -> None:
    backend = made()
    batch = [(2, 5000), (2, 300)]
    case = make_case(batch, device=CUDA, dtype=torch.bfloat16, cache_format=backend.cache_format)
    part = case.tables()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        planned = backend.plan(part, num_heads=16, kv_lora_rank=512)
        got = backend.forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, planned, softmax_scale=0.1
        )
        return got.out, got.lse

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    part.seq_lens.copy_(torch.tensor([700, 299], device=CUDA))
    part.row_extent.copy_(torch.tensor([699, 700, 298, 299], device=CUDA))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)
