"""The packed kernel among stale memory, empty rows, strided queries and shards of the context."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.triton import TritonBackend
from specmla.reference import merge_attention_states
from specmla.testing import VerifyCase, assert_matches_oracle, make_case

SMALL: dict[str, Any] = {"kv_lora_rank": 32, "rope_dim": 16, "page_size": 16}


def attend(case: VerifyCase, backend: TritonBackend | None = None) -> AttentionOutput:
    backend = backend or TritonBackend()
    return backend.forward_mqa(
        case.q_latent,
        case.q_rope,
        case.latent_cache,
        case.planned(backend),
        softmax_scale=case.softmax_scale,
    )


def check(case: VerifyCase, backend: TritonBackend | None = None) -> AttentionOutput:
    got = attend(case, backend)
    assert_matches_oracle(got, case, case.tables())
    return got


def assert_same(got: AttentionOutput, expected: AttentionOutput) -> None:
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("query_len", [1, 3])
def test_padded_batch(query_len: int, device: torch.device) -> None:  # BL-04
    lens = [(query_len, 5), (query_len, 130), (query_len, 64)]
    alone = check(make_case(lens, num_heads=4, device=device, **SMALL), TritonBackend(3))
    padded_case = make_case([*lens, (query_len, 0)], num_heads=4, device=device, **SMALL)
    live = make_case(lens, num_heads=4, device=device, **SMALL)
    padded_case.q_latent[:-query_len] = live.q_latent
    padded_case.q_rope[:-query_len] = live.q_rope
    padded = dataclasses.replace(
        padded_case,
        latent_cache=live.latent_cache,
        requests=(*live.requests, padded_case.requests[-1]),
    )
    got = attend(padded, TritonBackend(3))
    assert torch.equal(got.out[:-query_len], alone.out)
    assert torch.equal(got.lse[:-query_len], alone.lse)
    assert (got.out[-query_len:] == 0).all()
    assert (got.lse[-query_len:] == -math.inf).all()


@pytest.mark.parametrize("page_size", [16, 64])
def test_what_lies_past_the_length_does_not_matter(  # BL-05
    page_size: int, device: torch.device
) -> None:
    results = [
        check(
            make_case(
                "1q1s1,1q2s63,1q3s65",
                num_heads=3,
                poison=fill,
                unused_cell=cell,
                page_gap=48,
                spare_pages=30,  # so that page 0 belongs to nobody
                kv_lora_rank=32,
                rope_dim=16,
                page_size=page_size,
                device=device,
            )
        )
        for fill, cell in ((math.nan, 2**31 - 1), (math.inf, -1), (0.0, 0))
    ]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_later_draft_does_not_leak_into_earlier_rows(device: torch.device) -> None:  # BL-05
    case = make_case([(3, 65)], num_heads=3, device=device, **SMALL)
    before = attend(case)
    case.latent_cache.view(-1, 48)[case.slots(0)[-1]] = 1e4
    after = attend(case)
    assert torch.equal(after.out[:2], before.out[:2])
    assert torch.equal(after.lse[:2], before.lse[:2])


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_without_keys_are_the_empty_state(  # BL-07
    num_splits: int, device: torch.device
) -> None:
    case = make_case([(3, 2), (3, 1), (3, 64), (2, 0)], num_heads=3, device=device, **SMALL)
    got = check(case, TritonBackend(num_splits))
    for row in (0, 3, 4, 9, 10):
        assert (got.out[row] == 0).all()
        assert (got.lse[row] == -math.inf).all()
    merged = merge_attention_states(got.out[:1], got.lse[:1], got.out[6:7], got.lse[6:7])
    assert_same(merged, AttentionOutput(got.out[6:7], got.lse[6:7]))


@pytest.mark.parametrize("layout", ["heads_first", "slice"])
def test_strided_query(layout: str, device: torch.device) -> None:  # BL-12
    case = make_case("1q3s33,1q2s16", num_heads=6, query_layout=layout, device=device, **SMALL)
    assert not case.q_latent.is_contiguous()
    copies = dataclasses.replace(
        case, q_latent=case.q_latent.contiguous(), q_rope=case.q_rope.contiguous()
    )
    assert_same(attend(case), attend(copies))


def test_lse_is_natural(device: torch.device) -> None:  # BL-40
    case = make_case([(1, 65)], num_heads=2, device=device, **SMALL)
    case.q_latent.zero_()
    case.q_rope.zero_()
    for num_splits in (1, 3):
        lse = attend(case, TritonBackend(num_splits)).lse
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(65)))


def test_shards_by_window_and_extent_merge_to_the_whole(device: torch.device) -> None:  # BL-40
    case = make_case([(2, 65)], num_heads=3, device=device, **SMALL)
    whole = check(case)
    states = []
    for first, last in ((0, 20), (20, 41), (41, 65)):
        part = case.tables()
        part = dataclasses.replace(
            part,
            row_start=torch.full_like(part.row_extent, first),
            row_extent=part.row_extent.clamp(max=last),
        )
        backend = TritonBackend()
        part = backend.plan(part, num_heads=3, kv_lora_rank=32, dtype=case.spec.dtype)
        states.append(
            backend.forward_mqa(
                case.q_latent,
                case.q_rope,
                case.latent_cache,
                part,
                softmax_scale=case.softmax_scale,
            )
        )
    merged = states[0]
    for state in states[1:]:
        merged = merge_attention_states(*merged, *state)
    assert_matches_oracle(merged, case, case.tables())
    torch.testing.assert_close(merged.lse, whole.lse)
