from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.errors import ArgumentError
from specmla.mask import DraftMask
from specmla.metadata import RequestKind, RequestRows, VerifyPart
from specmla.reference import absorbed_mqa, expanded_mha, merge_attention_states
from specmla.testing import VerifyCase, make_case, make_verify_part, relative_error, row_errors

EMPTY = -math.inf


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
