"""The packed kernel against the specification: every mask, ragged rows, splits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.triton import TritonBackend
from specmla.errors import ArgumentError
from specmla.kernels.launch import LaunchEntry
from specmla.mask import DraftMask
from specmla.testing import VerifyCase, assert_matches_oracle, make_case

SMALL: dict[str, Any] = {"kv_lora_rank": 32, "rope_dim": 16, "page_size": 16}

TILES = {
    "rows16": LaunchEntry(16, 16, 16, 4, 1),
    "branched64": LaunchEntry(64, 64, 32, 8, 2, branched=True),
}


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


@pytest.mark.parametrize("num_heads", [1, 3, 12, 16, 20, 40])
def test_any_head_count_and_ragged_rows(num_heads: int, device: torch.device) -> None:
    check(make_case("1q3s65,1q0s7,1q1s16,1q4s17", num_heads=num_heads, device=device, **SMALL))


@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
@pytest.mark.parametrize("tile", TILES)
def test_lengths_around_pages_and_steps(tile: str, page_size: int, device: torch.device) -> None:
    lens = [(2, n) for n in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128)]
    case = make_case(
        lens, num_heads=3, kv_lora_rank=32, rope_dim=16, page_size=page_size, device=device
    )
    check(case, TritonBackend(num_splits=1, config=TILES[tile]))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("mask", DraftMask)
def test_masks(mask: DraftMask, tile: str, device: torch.device) -> None:
    case = make_case(
        "1q7s40,1q5s5,1q1s33", num_heads=5, mask=mask, windows=True, device=device, **SMALL
    )
    check(case, TritonBackend(num_splits=2, config=TILES[tile]))


@pytest.mark.parametrize("tile", TILES)
def test_tree_of_64_nodes_in_any_order(tile: str, device: torch.device) -> None:
    case = make_case("1q64s70", num_heads=1, mask=DraftMask.TREE, device=device, **SMALL)
    bits = case.tables().tree_bits
    assert bits is not None
    assert (bits < 0).any(), "no row uses bit 63"
    assert (bits[:-1] > bits[1:]).any(), "the nodes are in order"
    check(case, TritonBackend(config=TILES[tile]))


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16])
def test_split_counts_up_to_more_than_pages(num_splits: int, device: torch.device) -> None:
    case = make_case([(3, 1), (3, 65), (3, 150)], num_heads=4, device=device, **SMALL)
    check(case, TritonBackend(num_splits=num_splits, config=TILES["rows16"]))


def test_many_splits_of_a_longer_request(device: torch.device) -> None:  # BL-15
    case = make_case([(3, 1), (3, 65), (3, 700)], num_heads=16, device=device, **SMALL)
    check(case, TritonBackend(num_splits=20, config=TILES["branched64"]))


@pytest.mark.parametrize(("rank", "rope"), [(16, 0), (64, 32), (128, 0), (32, 64)])
def test_dims(rank: int, rope: int, device: torch.device) -> None:
    case = make_case(
        "1q2s20,1q3s33",
        num_heads=6,
        kv_lora_rank=rank,
        rope_dim=rope,
        page_size=16,
        dtype=torch.float16,
        device=device,
    )
    check(case)


@pytest.mark.parametrize("query_len", [2, 3, 4, 5, 7])
def test_each_row_is_a_single_decode(query_len: int, device: torch.device) -> None:  # BL-02
    case = make_case([(query_len, 65)], num_heads=16, device=device, **SMALL)
    got = check(case)
    for row in range(query_len):
        single = dataclasses.replace(
            case,
            q_latent=case.q_latent[row : row + 1],
            q_rope=case.q_rope[row : row + 1],
            requests=(case.requests[0]._replace(query_len=1, seq_len=65 - query_len + row + 1),),
        )
        alone = check(single)
        torch.testing.assert_close(got.out[row], alone.out[0], rtol=1e-5, atol=1e-6)
    case.latent_cache.view(-1, 48)[case.slots(0)[-1]] = 3.0
    changed = attend(case)
    assert torch.equal(changed.out[:-1], got.out[:-1])
    assert not torch.equal(changed.out[-1], got.out[-1])


def test_same_bits_again(device: torch.device) -> None:
    case = make_case("1q3s65,1q2s40", num_heads=4, device=device, **SMALL)
    assert_same(attend(case, TritonBackend(3)), attend(case, TritonBackend(3)))


def test_no_rows_at_all(device: torch.device) -> None:
    got = attend(make_case([(0, 7), (0, 0)], num_heads=3, device=device, **SMALL))
    assert got.out.shape == (0, 3, 32)
    assert got.lse.shape == (0, 3)


def test_everything_wrong_is_listed_at_once(device: torch.device) -> None:
    case = make_case([(2, 20)], num_heads=3, device=device, **SMALL)
    backend = TritonBackend()
    with pytest.raises(ArgumentError) as caught:
        backend.forward_mqa(
            case.q_latent[:1, :, ::2],
            case.q_rope.to(torch.float16),
            case.latent_cache.transpose(0, 1),
            case.planned(backend),
            softmax_scale=0.1,
        )
    for word in ("q_latent", "latent_cache", "dtypes", "stride"):
        assert word in str(caught.value)


def test_plan_of_other_heads_is_refused(device: torch.device) -> None:
    case = make_case([(2, 20)], num_heads=3, device=device, **SMALL)
    backend = TritonBackend(num_splits=2)
    part = backend.plan(case.tables(), num_heads=4, kv_lora_rank=32)
    arguments: tuple[Tensor, ...] = (case.q_latent, case.q_rope, case.latent_cache)
    with pytest.raises(ArgumentError, match=r"\(2, 4, 32\), the query is \(2, 3, 32\).*of 2 bytes"):
        backend.forward_mqa(*arguments, part, softmax_scale=0.1)
    with pytest.raises(ArgumentError, match=r"part\.plan is NoneType"):
        backend.forward_mqa(*arguments, case.tables(), softmax_scale=0.1)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_batches(device: torch.device, data: st.DataObject) -> None:
    lens = data.draw(
        st.lists(
            st.integers(0, 40).flatmap(lambda s: st.tuples(st.integers(0, min(s, 6)), st.just(s))),
            min_size=1,
            max_size=3,
        )
    )
    case = make_case(
        lens,
        num_heads=data.draw(st.sampled_from([1, 2, 5, 17])),
        kv_lora_rank=data.draw(st.sampled_from([16, 32])),
        rope_dim=data.draw(st.sampled_from([0, 16])),
        page_size=data.draw(st.sampled_from([16, 32, 64])),
        mask=data.draw(st.sampled_from(DraftMask)),
        windows=data.draw(st.booleans()),
        page_gap=data.draw(st.sampled_from([0, 16])),
        query_layout=data.draw(st.sampled_from(["packed", "heads_first", "slice"])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float16])),
        seed=data.draw(st.integers(0, 99)),
        device=device,
    )
    tile = data.draw(st.sampled_from([None, *TILES.values()]))
    check(case, TritonBackend(data.draw(st.sampled_from([None, 1, 2, 5])), tile))
