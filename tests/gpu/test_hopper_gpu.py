"""The Hopper backend on a real device: hostile cases, page forms, rows against decodes, races."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.hopper import HopperBackend
from specmla.mask import DraftMask
from specmla.testing import VerifyCase, assert_matches_oracle, make_case

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0"),
]

RAGGED = [(4, 777), (8, 1290), (3, 64), (1, 9), (0, 0), (0, 100), (2, 8191)]


def attend(case: VerifyCase) -> AttentionOutput:
    backend = HopperBackend()
    part = case.planned(backend)
    return backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )


def build(batch: Any = RAGGED, **options: Any) -> VerifyCase:
    return make_case(batch, **({"device": CUDA, "dtype": torch.bfloat16} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": DraftMask.FULL},
        {"mask": DraftMask.TREE},
        {"windows": True},
        {"page_size": 16},
        {"page_size": 32, "mask": DraftMask.TREE},
        {"page_size": 128, "page_gap": 640},
        {"query_layout": "heads_first"},
        {"query_layout": "slice", "num_heads": 40},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_hostile_cases(options: dict[str, Any]) -> None:
    case = build(**options)
    assert_matches_oracle(attend(case), case, case.tables())


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16, 20, 40, 63, 64, 96, 126, 128])
def test_any_number_of_heads(heads: int) -> None:
    case = build([(1, 63), (2, 65), (4, 1000), (7, 128)], num_heads=heads)
    assert_matches_oracle(attend(case), case, case.tables())


@pytest.mark.parametrize("query_len", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("extra", [0, 1, 63, 64, 65, 127, 128, 8191])
def test_lengths_around_a_block(query_len: int, extra: int) -> None:
    case = build([(query_len, query_len + extra)])
    assert_matches_oracle(attend(case), case, case.tables())


def test_rows_without_keys_are_the_empty_state() -> None:
    # Two keys for four rows: the first two rows see none.
    case = build([(4, 2), (2, 0)])
    got = attend(case)
    assert (got.lse[[0, 1, 4, 5]] == -torch.inf).all()
    assert (got.out[[0, 1, 4, 5]] == 0).all()


def test_each_row_of_a_verify_is_a_decode() -> None:
    case = build([(4, 1000)])
    verify = attend(case)
    for t in range(4):
        request = case.requests[0]._replace(query_len=1, seq_len=997 + t)
        alone = dataclasses.replace(
            case,
            q_latent=case.q_latent[t : t + 1],
            q_rope=case.q_rope[t : t + 1],
            requests=(request,),
        )
        got = attend(alone)
        torch.testing.assert_close(verify.out[t : t + 1], got.out, rtol=0.02, atol=0.01)
        torch.testing.assert_close(verify.lse[t : t + 1], got.lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch", ["1q4s8191", "32q4s2k", "8q1-8s4k"])
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
