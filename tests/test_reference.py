from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmla.backends.base import AttentionOutput
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.reference import absorbed_mqa, expanded_mha
from specmla.testing import VerifyCase, make_case, make_verify_part, row_errors

EMPTY = -math.inf
SMALL: dict[str, Any] = {"num_heads": 3, "kv_lora_rank": 16, "rope_dim": 8, "page_size": 16}


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    lens = []
    for _ in range(draw(st.integers(1, 4))):
        seq_len = draw(st.sampled_from([0, 1, 2, 15, 17, 63, 64, 65, 127, 128]))
        lens.append((min(seq_len, draw(st.sampled_from([0, 1, 2, 3, 5, 64]))), seq_len))
    return lens


def run(case: VerifyCase, part: VerifyPart | None = None) -> AttentionOutput:
    return absorbed_mqa(
        case.q_latent,
        case.q_rope,
        case.latent_cache,
        part or case.tables(),
        softmax_scale=case.softmax_scale,
    )


@settings(max_examples=40)
@given(
    batches(),
    st.sampled_from(list(DraftMask)),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([(1, 16, 0, 8, 8), (3, 16, 32, 24, 8), (5, 32, 64, 16, 40)]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_absorbed_equals_expanded(
    batch: list[tuple[int, int]],
    mask: DraftMask,
    page_size: int,
    dims: tuple[int, int, int, int, int],
    windows: bool,
    seed: int,
) -> None:
    """Two computations that share nothing but the look-up of cached rows, in float64."""
    num_heads, rank, rope, nope, v_dim = dims
    case = make_case(
        batch, num_heads=num_heads, kv_lora_rank=rank, rope_dim=rope, page_size=page_size,
        dtype=torch.float64, mask=mask, seed=seed, windows=windows,
    )  # fmt: skip
    part = case.tables()
    draw = torch.Generator().manual_seed(seed)
    shapes = [(part.num_rows, num_heads, nope), (num_heads, nope, rank), (num_heads, rank, v_dim)]
    q_nope, w_uk_t, w_uv = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    absorbed = absorbed_mqa(
        torch.einsum("thp,hpc->thc", q_nope, w_uk_t),
        case.q_rope, case.latent_cache, part, softmax_scale=0.05,
    )  # fmt: skip
    expanded = expanded_mha(
        q_nope, case.q_rope, case.latent_cache, part,
        w_uk_t=w_uk_t, w_uv=w_uv, softmax_scale=0.05,
    )  # fmt: skip
    lifted = torch.einsum("thc,hcv->thv", absorbed.out, w_uv)
    if part.num_rows:
        assert float(row_errors(lifted, expanded.out).max()) <= 1e-12
    empty = expanded.lse == EMPTY
    assert torch.equal(absorbed.lse == EMPTY, empty)
    assert not expanded.out[empty].any()
    assert not absorbed.out[empty].any()
    torch.testing.assert_close(absorbed.lse, expanded.lse, rtol=2e-7, atol=2e-7)
    assert absorbed.lse.dtype == expanded.lse.dtype == torch.float32


def test_absorbed_mqa_of_one_key_is_that_key() -> None:
    case = make_case([(1, 1)], num_heads=3, kv_lora_rank=16, rope_dim=8, dtype=torch.float64)
    key = case.latent_cache.flatten(0, 1)[case.slots(0)][0]
    got = run(case)
    assert torch.equal(got.out, key[:16].expand(1, 3, 16))
    score = torch.cat([case.q_latent, case.q_rope], -1) @ key * case.softmax_scale
    torch.testing.assert_close(got.lse.double(), score, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_is_natural(dtype: torch.dtype) -> None:
    """A zero query sees 65 keys with equal weight: ln 65, not log2 65 = 6.022368."""
    case = make_case([(1, 65)], num_heads=2, kv_lora_rank=16, rope_dim=8, dtype=dtype)
    zero = torch.zeros_like
    got = absorbed_mqa(
        zero(case.q_latent), zero(case.q_rope), case.latent_cache, case.tables(), softmax_scale=1.0
    )
    torch.testing.assert_close(got.lse, torch.full((1, 2), 4.174387), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seq_len", [0, 1, 2])
def test_rows_without_keys_are_the_empty_state(seq_len: int) -> None:
    """seq_len < query_len = 3: the first 3 - seq_len rows see nothing."""
    case = make_case([(3, seq_len), (1, 7)], num_heads=2, kv_lora_rank=16, rope_dim=8, page_size=4)
    got = run(case)
    assert not got.out[: 3 - seq_len].any()
    assert (got.lse[: 3 - seq_len] == EMPTY).all()
    assert got.lse[3 - seq_len :].isfinite().all()
    assert got.out.isfinite().all()


def test_requests_without_context_stand_beside_others() -> None:
    """Context lengths 0, 64, 0 with three rows each: every row sees itself at least."""
    got = run(make_case([(3, 3), (3, 67), (3, 3)], num_heads=2, kv_lora_rank=16, rope_dim=8))
    assert got.lse.isfinite().all()


@pytest.mark.parametrize("mask", list(DraftMask))
@pytest.mark.parametrize("seq_len", [1, 63, 65])
def test_bits_past_the_length_do_not_matter(seq_len: int, mask: DraftMask) -> None:
    results = [
        run(make_case([(1, seq_len), (0, 3)], num_heads=2, kv_lora_rank=16, rope_dim=8, mask=mask,
                      poison=poison, unused_cell=cell, page_gap=5))
        for poison, cell in ((math.nan, 2**31 - 1), (math.inf, -1), (0.0, 0))
    ]  # fmt: skip
    for got in results[1:]:
        assert torch.equal(got.out, results[0].out)
        assert torch.equal(got.lse, results[0].lse)


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_keys_that_no_row_of_a_request_sees_do_not_matter(fill: float) -> None:
    """Keys before the window and past every extent; the batch is ragged, so rows are padded."""
    case = make_case([(1, 50), (3, 40)], **SMALL)
    first = case.requests[0]._replace(window_start=20)
    part = make_verify_part([first, case.requests[1]], DraftMask.CAUSAL, page_size=16)
    extent = torch.tensor([45, 39, 39, 39], dtype=torch.int32)
    part = dataclasses.replace(part, row_extent=extent)
    want = run(case, part)
    flat = case.latent_cache.flatten(0, 1)
    flat[case.slots(0)[:20]] = fill
    flat[case.slots(0)[45:]] = fill
    flat[case.slots(1)[39:]] = fill
    got = run(case, part)
    assert got.out.isfinite().all()
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_an_extent_past_the_length_sees_the_length() -> None:
    case = make_case([(1, 50), (2, 40)], **SMALL)
    part = case.tables()
    far = dataclasses.replace(part, row_extent=torch.tensor([60, 39, 99], dtype=torch.int32))
    got, want = run(case, far), run(case, part)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_a_chain_written_as_a_tree_is_the_causal_mask() -> None:
    batch = [(64, 80), (1, 5), (7, 7)]
    dims = {"num_heads": 2, "kv_lora_rank": 16, "rope_dim": 8, "dtype": torch.float64}
    case = make_case(batch, **dims)
    chain = [r._replace(parents=range(-1, r.query_len - 1)) for r in case.requests]
    got = run(case, make_verify_part(chain, DraftMask.TREE, page_size=64))
    want = run(case)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def renumbered(case: VerifyCase, names: list[int]) -> tuple[VerifyPart, VerifyCase]:
    """The same tree with node i called names[i]: rows, cache slots and parents move together."""
    (request,) = case.requests
    parents, slots = list(request.parents), case.slots(0)[-len(names) :]
    for node, parent in enumerate(request.parents):
        parents[names[node]] = -1 if parent == -1 else names[parent]
    cache = case.latent_cache.clone()
    flat = cache.flatten(0, 1)
    flat[slots[names]] = case.latent_cache.flatten(0, 1)[slots]
    back = torch.argsort(torch.tensor(names))
    moved = VerifyCase(
        case.spec, case.q_latent[back], case.q_rope[back], flat.view_as(cache), case.requests
    )
    part = make_verify_part(
        [request._replace(parents=parents)], DraftMask.TREE, page_size=case.spec.page_size
    )
    return part, moved


def test_a_tree_does_not_depend_on_node_order() -> None:
    case = make_case([(64, 100)], num_heads=2, kv_lora_rank=16, rope_dim=8, page_size=16,
                     mask=DraftMask.TREE, dtype=torch.float64)  # fmt: skip
    names = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    part, moved = renumbered(case, names)
    torch.testing.assert_close(run(moved, part).out[names], run(case).out, rtol=1e-12, atol=1e-12)
