"""The row kernel against the specification and against the packed kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.rows import RowsBackend
from specmla.backends.triton import TritonBackend
from specmla.errors import ArgumentError
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.query import decode_rows
from specmla.testing import VerifyCase, assert_matches_oracle, make_case

SMALL: dict[str, Any] = {"kv_lora_rank": 32, "rope_dim": 16, "page_size": 16}


def row_part(case: VerifyCase, backend: RowsBackend) -> VerifyPart:
    part = case.tables()
    lens = torch.tensor(part.query_lens, device=part.seq_lens.device)
    rows = decode_rows(part.row_extent, part.block_table, lens, part.num_rows)
    spec = case.spec
    return backend.plan(
        dataclasses.replace(part, rows=rows),
        num_heads=spec.num_heads,
        kv_lora_rank=spec.kv_lora_rank,
        dtype=spec.dtype,
    )


def attend(case: VerifyCase, backend: RowsBackend | None = None) -> AttentionOutput:
    backend = backend or RowsBackend()
    return backend.forward_mqa(
        case.q_latent,
        case.q_rope,
        case.latent_cache,
        row_part(case, backend),
        softmax_scale=case.softmax_scale,
    )


def check(case: VerifyCase, backend: RowsBackend | None = None) -> AttentionOutput:
    got = attend(case, backend)
    assert_matches_oracle(got, case, case.tables())
    return got


@pytest.mark.parametrize("num_heads", [1, 3, 12, 16, 20, 40])
def test_any_head_count_and_ragged_rows(num_heads: int, device: torch.device) -> None:
    check(make_case("1q3s65,1q0s7,1q1s16", num_heads=num_heads, device=device, **SMALL))


@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
def test_lengths_around_pages_and_steps(page_size: int, device: torch.device) -> None:
    lens = [(1, n) for n in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128)]
    case = make_case(
        lens, num_heads=3, kv_lora_rank=32, rope_dim=16, page_size=page_size, device=device
    )
    check(case, RowsBackend(num_splits=1))


@pytest.mark.parametrize("mask", [DraftMask.CAUSAL, DraftMask.FULL])
def test_masks_and_windows(mask: DraftMask, device: torch.device) -> None:
    case = make_case("1q4s40,1q3s3", num_heads=5, mask=mask, windows=True, device=device, **SMALL)
    check(case, RowsBackend(num_splits=2))


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16])
def test_split_counts_up_to_more_than_pages(num_splits: int, device: torch.device) -> None:
    case = make_case([(2, 1), (2, 65), (1, 150)], num_heads=4, device=device, **SMALL)
    check(case, RowsBackend(num_splits))


@pytest.mark.parametrize(("rank", "rope"), [(16, 0), (64, 32), (32, 64)])
def test_dims(rank: int, rope: int, device: torch.device) -> None:
    case = make_case(
        "1q2s20",
        num_heads=6,
        kv_lora_rank=rank,
        rope_dim=rope,
        page_size=16,
        dtype=torch.float16,
        device=device,
    )
    check(case)


@pytest.mark.parametrize("page_size", [16, 64])
def test_what_lies_past_the_length_does_not_matter(  # BL-05
    page_size: int, device: torch.device
) -> None:
    results = [
        check(
            make_case(
                "1q1s1,1q3s65",
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
    for other in results[1:]:
        assert torch.equal(other.out, results[0].out)
        assert torch.equal(other.lse, results[0].lse)


def test_rows_without_keys_are_the_empty_state(device: torch.device) -> None:  # BL-04, BL-07
    case = make_case([(3, 2), (3, 1), (2, 0), (1, 40)], num_heads=3, device=device, **SMALL)
    for num_splits in (1, 2):
        got = check(case, RowsBackend(num_splits))
        for row in (0, 3, 4, 6, 7):
            assert (got.out[row] == 0).all()
            assert (got.lse[row] == -math.inf).all()


@pytest.mark.parametrize("layout", ["heads_first", "slice"])
def test_strided_query(layout: str, device: torch.device) -> None:  # BL-12
    case = make_case("1q3s33", num_heads=6, query_layout=layout, device=device, **SMALL)
    copies = dataclasses.replace(
        case, q_latent=case.q_latent.contiguous(), q_rope=case.q_rope.contiguous()
    )
    got, expected = attend(case), attend(copies)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def test_agrees_with_the_packed_kernel(device: torch.device) -> None:
    case = make_case("1q5s65,1q2s16", num_heads=7, page_gap=32, device=device, **SMALL)
    packed = TritonBackend()
    other = packed.forward_mqa(
        case.q_latent,
        case.q_rope,
        case.latent_cache,
        case.planned(packed),
        softmax_scale=case.softmax_scale,
    )
    got = check(case)
    torch.testing.assert_close(got.out, other.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse, other.lse)


def test_tree_and_missing_tables_are_refused(device: torch.device) -> None:
    backend = RowsBackend()
    case = make_case("1q3s33", num_heads=2, mask=DraftMask.TREE, device=device, **SMALL)
    with pytest.raises(ArgumentError, match="'tree'") as caught:
        backend.forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, case.tables(), softmax_scale=0.1
        )
    assert "row tables" in str(caught.value)
