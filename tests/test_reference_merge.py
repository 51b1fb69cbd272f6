from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.errors import ArgumentError
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows, VerifyPart
from specmla.reference import absorbed_mqa, merge_attention_states
from specmla.testing import VerifyCase, make_case, make_verify_part, relative_error

EMPTY = -math.inf
SMALL: dict[str, Any] = {"num_heads": 3, "kv_lora_rank": 16, "rope_dim": 8, "page_size": 16}


def run(case: VerifyCase, part: VerifyPart | None = None) -> AttentionOutput:
    return absorbed_mqa(
        case.q_latent,
        case.q_rope,
        case.latent_cache,
        part or case.tables(),
        softmax_scale=case.softmax_scale,
    )


def state(seed: int, *, empty: bool = False, garbage: float = 0.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    if empty:
        return torch.full((4, 3, 8), garbage), torch.full((4, 3), EMPTY)
    return torch.randn(4, 3, 8, generator=draw), torch.randn(4, 3, generator=draw) * 20


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_merging_an_empty_state_changes_no_bit(garbage: float) -> None:
    full, empty = state(0), state(1, empty=True, garbage=garbage)
    full[0][0, 0, 0] = -0.0
    for got in (merge_attention_states(*full, *empty), merge_attention_states(*empty, *full)):
        assert torch.equal(got.out.view(torch.int32), full[0].view(torch.int32))
        assert torch.equal(got.lse, full[1])
    got = merge_attention_states(*empty, *empty)
    assert not got.out.any()
    assert (got.lse == EMPTY).all()


def test_merge_weights_are_those_of_natural_lse() -> None:
    """LSE 2.0 and 1.0: weights 0.7311 and 0.2689."""
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    got = merge_attention_states(one, torch.full((1, 1), 2.0), zero, torch.full((1, 1), 1.0))
    assert float(got.out) == pytest.approx(0.7310586, abs=1e-6)
    assert float(got.lse) == pytest.approx(math.log(math.e**2 + math.e), abs=1e-6)


@pytest.mark.parametrize("middle_is_empty", [False, True])
def test_the_order_of_three_states_does_not_matter(middle_is_empty: bool) -> None:
    states = [state(0), state(1, empty=middle_is_empty, garbage=math.nan), state(2)]
    results = []
    for a, b, c in itertools.permutations(states):
        results.append(merge_attention_states(*merge_attention_states(*a, *b), *c))
        results.append(merge_attention_states(*a, *merge_attention_states(*b, *c)))
    for got in results[1:]:
        torch.testing.assert_close(got.out, results[0].out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.lse, results[0].lse, rtol=1e-6, atol=1e-6)


def test_merge_keeps_the_dtype_and_refuses_shapes_that_disagree() -> None:
    out, lse = state(0)
    assert (
        merge_attention_states(out.bfloat16(), lse, out.bfloat16(), lse).out.dtype is torch.bfloat16
    )
    with pytest.raises(ArgumentError, match=r"out_b \(3, 3, 8\)"):
        merge_attention_states(out, lse, out[:3], lse)
    with pytest.raises(ArgumentError, match=r"lse_b \(4, 2\)"):
        merge_attention_states(out, lse, out, lse[:, :2])


@given(st.lists(st.integers(0, 130), min_size=0, max_size=6), st.sampled_from(list(DraftMask)))
@settings(max_examples=20)
def test_windows_of_the_context_merge_to_the_whole(cuts: list[int], mask: DraftMask) -> None:
    """Any partition of the keys, empty windows included, gives the attention over all keys."""
    case = make_case([(5, 130), (1, 64), (3, 3)], num_heads=2, kv_lora_rank=16, rope_dim=8,
                     page_size=16, mask=mask, dtype=torch.float64)  # fmt: skip
    part = case.tables()
    edges = [0, *sorted(cuts), 130]
    merged = None
    for low, high in itertools.pairwise(edges):
        window = make_verify_part(
            [r._replace(window_start=low) for r in case.requests], mask, page_size=16
        )
        extent = part.row_extent.clamp(max=high)
        got = run(case, dataclasses.replace(window, row_extent=extent))
        merged = got if merged is None else merge_attention_states(*merged, *got)
    want = run(case)
    # LSE travels in float32 between the shards, and weights are off by as much.
    assert relative_error(merged.out, want.out) <= 1e-6
    torch.testing.assert_close(merged.lse, want.lse, rtol=1e-6, atol=1e-6)


def test_even_and_odd_positions_as_shards_merge_to_the_whole() -> None:
    case = make_case([(1, 65)], num_heads=4, kv_lora_rank=16, rope_dim=8, dtype=torch.float64)
    rows = case.latent_cache.flatten(0, 1)[case.slots(0)]
    shards = []
    for parity in (0, 1):
        kept = rows[parity::2]
        cache = torch.full((2, 64, 24), math.nan, dtype=torch.float64)
        cache[1, : len(kept)] = kept
        request = RequestRows(RequestKind.VERIFY, 1, len(kept), (1,))
        part = make_verify_part([request], DraftMask.FULL, page_size=64)
        shards.append(
            absorbed_mqa(case.q_latent, case.q_rope, cache, part, softmax_scale=case.softmax_scale)
        )
    got, want = merge_attention_states(*shards[0], *shards[1]), run(case)
    assert relative_error(got.out, want.out) <= 1e-6
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-6)
