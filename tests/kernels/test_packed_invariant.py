"""Batch-invariant results: a row's bits depend on its own query and keys alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from specmla.backends.base import AttentionOutput
from specmla.backends.triton import TritonBackend
from specmla.errors import ArgumentError
from specmla.kernels.launch import LaunchEntry
from specmla.mask import DraftMask
from specmla.testing import VerifyCase, assert_matches_oracle, make_case

pytestmark = pytest.mark.usefixtures("dots_by_row")

SMALL: dict[str, Any] = {"kv_lora_rank": 32, "rope_dim": 16, "page_size": 16}
WIDE = LaunchEntry(64, 64, 32, 8, 2, branched=True)
NARROW = LaunchEntry(16, 16, 16, 4, 1)


def invariant(config: LaunchEntry | None = None) -> TritonBackend:
    """Pieces of 64 keys, so that short requests have several."""
    return TritonBackend(config=config, batch_invariant=True, piece_keys=64)


def first_row(case: VerifyCase, request: int) -> int:
    return sum(r.query_len for r in case.requests[:request])


def take(case: VerifyCase, requests: Sequence[int]) -> VerifyCase:
    """Give a batch of some requests of `case`, in that order, over the same cache."""
    rows = [first_row(case, i) + t for i in requests for t in range(case.requests[i].query_len)]
    return dataclasses.replace(
        case,
        q_latent=case.q_latent[rows],
        q_rope=case.q_rope[rows],
        requests=tuple(case.requests[i] for i in requests),
    )


def decode_of_row(case: VerifyCase, request: int, row: int) -> VerifyCase:
    """Give the single-token decode whose length is the extent of a verify's row."""
    at = first_row(case, request) + row
    r = case.requests[request]
    length = max(0, r.seq_len - r.query_len + 1 + row)
    return dataclasses.replace(
        case,
        q_latent=case.q_latent[at : at + 1],
        q_rope=case.q_rope[at : at + 1],
        requests=(r._replace(query_len=1, seq_len=length),),
    )


def assert_same(got: AttentionOutput, expected: AttentionOutput, rows: slice) -> None:
    assert torch.equal(got.out[rows], expected.out)
    assert torch.equal(got.lse[rows], expected.lse)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        (DraftMask.CAUSAL, torch.float32),
        (DraftMask.FULL, torch.float16),
        (DraftMask.TREE, torch.float16),
    ],
)
def test_alone_or_in_any_batch(mask: DraftMask, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(
        [(3, 150), (1, 64), (0, 9), (5, 210), (2, 1), (2, 65)],
        num_heads=5,
        mask=mask,
        dtype=dtype,
        windows=True,
        device=device,
        **SMALL,
    )
    backend = invariant()
    whole = case.attend(backend)
    assert_matches_oracle(whole, case, case.tables())
    for order in ([0], [3], [5, 4, 3, 2, 1, 0], [0, 3, 0]):
        got = take(case, order).attend(backend)
        at = 0
        for i in order:
            rows = slice(first_row(case, i), first_row(case, i) + case.requests[i].query_len)
            alone = AttentionOutput(whole.out[rows], whole.lse[rows])
            assert_same(got, alone, slice(at, at + case.requests[i].query_len))
            at += case.requests[i].query_len


@pytest.mark.parametrize(
    ("num_heads", "config", "dtype"),
    [
        (3, None, torch.float32),
        (16, WIDE, torch.float16),
        (20, NARROW, torch.float32),
        (5, NARROW, torch.float16),
    ],
    ids=["table", "wide", "narrow", "narrow-half"],
)
def test_a_decode_is_its_row_of_a_verify(
    num_heads: int, config: LaunchEntry | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Lengths whose rows end on both sides of a page, of a step and of a piece."""
    lens = [(4, 65), (4, 3), (2, 17), (4, 131), (1, 64)]
    case = make_case(lens, num_heads=num_heads, dtype=dtype, device=device, **SMALL)
    backend = invariant(config)
    whole = case.attend(backend)
    assert_matches_oracle(whole, case, case.tables())
    for request, (query_len, _) in enumerate(lens):
        for row in range(query_len):
            at = first_row(case, request) + row
            alone = decode_of_row(case, request, row).attend(backend)
            assert_same(whole, alone, slice(at, at + 1))


def test_longer_mates_do_not_change_the_form_of_the_merge(device: torch.device) -> None:
    case = make_case([(2, 200), (1, 1500)], num_heads=4, device=device, **SMALL)
    backend = invariant(NARROW)
    assert_same(case.attend(backend), take(case, [0]).attend(backend), slice(0, 2))


@pytest.mark.parametrize("page_size", [16, 64])
def test_one_launch_entry_for_every_query_length(page_size: int, device: torch.device) -> None:
    options = SMALL | {"page_size": page_size}
    cases = [make_case([(q, 70)], num_heads=16, device=device, **options) for q in (1, 4, 9)]
    chosen = {case.planned(invariant()).plan.entry for case in cases}
    assert len(chosen) == 1
    assert len({case.planned(TritonBackend()).plan.entry for case in cases}) > 1


def test_balanced_pieces_do_change_bits(device: torch.device) -> None:
    """What the option is for; should this ever be equal, the tests above see nothing."""
    case = make_case([(2, 500), (2, 500), (2, 500)], num_heads=16, device=device, **SMALL)
    together, alone = case.attend(TritonBackend()), take(case, [0]).attend(TritonBackend())
    torch.testing.assert_close(together.out[:2], alone.out, rtol=1e-4, atol=1e-5)
    assert not torch.equal(together.out[:2], alone.out)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_batches(device: torch.device, data: st.DataObject) -> None:
    lens = data.draw(
        st.lists(
            st.integers(0, 300).flatmap(lambda s: st.tuples(st.integers(0, min(s, 6)), st.just(s))),
            min_size=1,
            max_size=4,
        )
    )
    case = make_case(
        lens,
        num_heads=data.draw(st.sampled_from([1, 5, 17])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float16])),
        seed=data.draw(st.integers(0, 99)),
        device=device,
        **SMALL,
    )
    backend = invariant(data.draw(st.sampled_from([None, WIDE, NARROW])))
    whole = case.attend(backend)
    request = data.draw(st.integers(0, len(lens) - 1))
    at, count = first_row(case, request), lens[request][0]
    assert_same(whole, take(case, [request]).attend(backend), slice(at, at + count))
    if count:
        row = data.draw(st.integers(0, count - 1))
        alone = decode_of_row(case, request, row).attend(backend)
        assert_same(whole, alone, slice(at + row, at + row + 1))


def test_pieces_of_whole_steps_only(device: torch.device) -> None:
    case = make_case([(1, 20)], num_heads=4, device=device, **SMALL)
    backend = TritonBackend(config=WIDE, batch_invariant=True, piece_keys=48)
    with pytest.raises(ArgumentError, match="piece_keys is 48, accepted are multiples of 32"):
        case.planned(backend)
