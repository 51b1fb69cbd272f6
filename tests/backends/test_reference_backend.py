from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmla.backends.base import AttentionOutput, Requirements
from specmla.backends.reference import ReferenceBackend
from specmla.errors import ArgumentError, UnsupportedError
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows, VerifyPart
from specmla.reference import expanded_mha, merge_attention_states
from specmla.testing import (
    VerifyCase,
    assert_matches_oracle,
    make_case,
    make_verify_part,
    relative_error,
    row_errors,
)

BACKEND = ReferenceBackend()
SMALL: dict[str, Any] = {"num_heads": 3, "kv_lora_rank": 16, "rope_dim": 8, "page_size": 16}
LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]


def attend(case: VerifyCase, tables: VerifyPart | None = None) -> AttentionOutput:
    return case.attend(BACKEND, tables)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    lens = []
    for _ in range(draw(st.integers(1, 5))):
        seq_len = draw(st.sampled_from(LENGTHS))
        lens.append((min(seq_len, draw(st.sampled_from([0, 1, 1, 2, 3, 4, 8, 64]))), seq_len))
    return lens


cases = st.builds(
    make_case,
    batches(),
    num_heads=st.sampled_from([1, 3, 12, 20, 40]),
    kv_lora_rank=st.sampled_from([16, 32, 128]),
    rope_dim=st.sampled_from([0, 32, 64]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    mask=st.sampled_from(list(DraftMask)),
    seed=st.integers(0, 2**16),
    query_layout=st.sampled_from(["packed", "heads_first", "slice"]),
    page_gap=st.sampled_from([0, 7, 64]),
    windows=st.booleans(),
)


@settings(max_examples=100)
@given(cases)
def test_forward_mqa_equals_the_absorbed_oracle(case: VerifyCase) -> None:
    assert_matches_oracle(attend(case), case, case.tables())


@settings(max_examples=15)
@given(batches(), st.sampled_from(list(DraftMask)), st.integers(0, 2**16), st.booleans())
def test_forward_mqa_lifted_equals_the_expanded_oracle(
    batch: list[tuple[int, int]], mask: DraftMask, seed: int, windows: bool
) -> None:
    """V = 20 differs from P = 12; float64."""
    case = make_case(batch, **SMALL, dtype=torch.float64, mask=mask, seed=seed, windows=windows)
    part = case.tables()
    draw = torch.Generator().manual_seed(seed)
    shapes = [(part.num_rows, 3, 12), (3, 12, 16), (3, 16, 20)]
    q_nope, w_uk_t, w_uv = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    want = expanded_mha(q_nope, case.q_rope, case.latent_cache, part,
                        w_uk_t=w_uk_t, w_uv=w_uv, softmax_scale=case.softmax_scale)  # fmt: skip
    q_latent = torch.einsum("thp,hpc->thc", q_nope, w_uk_t)
    got = attend(dataclasses.replace(case, q_latent=q_latent))
    lifted = torch.einsum("thc,hcv->thv", got.out, w_uv)
    if part.num_rows:
        assert float(row_errors(lifted, want.out).max()) <= 1e-12
    torch.testing.assert_close(got.lse, want.lse, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("query_len", [2, 3, 4, 5, 7])
def test_each_causal_row_is_a_decode_of_its_own_length(query_len: int, num_heads: int) -> None:
    case = make_case([(query_len, 65)], num_heads=num_heads, kv_lora_rank=32, rope_dim=16)
    got = attend(case)
    (request,) = case.requests
    for row in range(query_len):
        single = request._replace(query_len=1, seq_len=65 - query_len + row + 1)
        one = VerifyCase(case.spec, case.q_latent[row : row + 1], case.q_rope[row : row + 1],
                         case.latent_cache, (single,))  # fmt: skip
        want = attend(one)
        assert relative_error(got.out[row : row + 1], want.out) < 1e-6
        torch.testing.assert_close(got.lse[row : row + 1], want.lse, rtol=1e-6, atol=1e-6)
    case.latent_cache.flatten(0, 1)[case.slots(0)[-1]] = 1e4
    changed = attend(case)
    assert torch.equal(changed.out[:-1], got.out[:-1])
    assert torch.equal(changed.lse[:-1], got.lse[:-1])
    assert not torch.equal(changed.out[-1], got.out[-1])


@pytest.mark.parametrize("splits", [1, 2, 4, 16])
def test_any_split_of_the_keys_merges_to_the_whole(splits: int) -> None:
    """16 heads, 3 rows, kv 1, 65 and 700: 16 splits are more than the shorter requests' pages."""
    case = make_case([(1, 1), (3, 65), (3, 700)], **SMALL | {"num_heads": 16, "page_size": 64})
    part, want = case.tables(), attend(case)
    edges = torch.tensor([[s * i // splits for i in range(splits + 1)] for s in (1, 65, 700)])
    per_row = edges.repeat_interleave(torch.tensor(part.query_lens), dim=0).int()
    merged = None
    for low, high in itertools.pairwise(per_row.unbind(1)):
        extent = torch.minimum(part.row_extent, high)
        got = attend(case, dataclasses.replace(part, row_start=low.clone(), row_extent=extent))
        merged = got if merged is None else merge_attention_states(*merged, *got)
    assert relative_error(merged.out, want.out) < 2e-6
    torch.testing.assert_close(merged.lse, want.lse, rtol=1e-6, atol=1e-6)


def test_a_zero_query_gives_the_logarithm_of_the_key_count() -> None:
    case = make_case([(1, 65), (1, 1)], **SMALL)
    case.q_latent.zero_()
    case.q_rope.zero_()
    got = attend(case).lse
    torch.testing.assert_close(got[0], torch.full((3,), 4.174387), rtol=0, atol=1e-6)
    assert got[1].abs().max() == 0


def test_even_and_odd_positions_as_shards_merge_to_the_whole() -> None:
    case = make_case([(1, 65)], **SMALL)
    rows, states = case.latent_cache.flatten(0, 1)[case.slots(0)], []
    for parity in (0, 1):
        kept = rows[parity::2]
        cache = torch.full((4, 16, 24), math.nan)
        cache[1:].flatten(0, 1)[: len(kept)] = kept
        request = RequestRows(RequestKind.VERIFY, 1, len(kept), (1, 2, 3))
        part = make_verify_part([request], DraftMask.FULL, page_size=16)
        states.append(attend(dataclasses.replace(case, latent_cache=cache), part))
    got, want = merge_attention_states(*states[0], *states[1]), attend(case)
    assert relative_error(got.out, want.out) < 1e-6
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-6)


def test_forward_mqa_lists_all_that_disagrees() -> None:
    case, backend = make_case([(2, 40)], **SMALL), ReferenceBackend()
    with pytest.raises(ArgumentError) as caught:
        backend.forward_mqa(
            case.q_latent[:1], case.q_rope.double(), case.latent_cache[:, :8], case.tables(),
            softmax_scale=1.0,
        )  # fmt: skip
    wanted = ["accepted is [T=2, H, C]", "q_rope is (2, 3, 8)", "latent_cache is", "G=16",
              "one dtype", "plan is NoneType"]  # fmt: skip
    assert [text for text in wanted if text not in str(caught.value)] == []


def test_forward_mqa_refuses_other_heads_than_were_planned() -> None:
    case, other = make_case([(2, 40)], **SMALL), make_case([(2, 40)], **SMALL | {"num_heads": 4})
    with pytest.raises(ArgumentError, match="q_latent has 4 heads, the step was planned for 3"):
        BACKEND.forward_mqa(
            other.q_latent, other.q_rope, case.latent_cache, case.planned(BACKEND),
            softmax_scale=1.0,
        )  # fmt: skip


def test_problems_of_requirements_are_listed() -> None:
    need = Requirements(torch.device("meta"), torch.int8, 0, 64, 16, 0, frozenset(DraftMask))
    with pytest.raises(UnsupportedError) as caught:
        ReferenceBackend().check(need)
    assert len(caught.value.reasons) == 4
    good = dataclasses.replace(
        need, device=torch.device("cpu"), dtype=torch.bfloat16, num_heads=1, page_size=3
    )
    assert ReferenceBackend().problems(good) == []
