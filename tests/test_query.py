from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specmla.errors import ArgumentError
from specmla.mask import DraftMask, row_extents
from specmla.query import decode_rows, pad_heads, reshape_query_for_spec_decode
from specmla.reference import absorbed_mqa
from specmla.testing import make_case, make_verify_part


def test_reshape_query_is_a_view_and_flatten_undoes_it() -> None:
    query = torch.randn(6, 3, 8).transpose(1, 2)  # strides are none of its business
    got = reshape_query_for_spec_decode(query, 2)
    assert got.shape == (2, 3, 8, 3)
    assert got.data_ptr() == query.data_ptr()
    for request in range(2):
        for t in range(3):
            assert torch.equal(got[request, t], query[request * 3 + t])
    assert torch.equal(got.flatten(0, 1), query)


def test_reshape_query_accepts_no_rows() -> None:
    assert reshape_query_for_spec_decode(torch.empty(0, 3, 8), 4).shape == (4, 0, 3, 8)


@pytest.mark.parametrize(
    ("shape", "num_requests", "text"),
    [
        ((7, 3, 8), 2, "divisors of T=7"),
        ((6, 3, 8), 0, "num_requests is 0"),
        ((6, 3, 8), -2, "num_requests is -2"),
        ((6, 24), 2, "[T, H, D]"),
    ],
)
def test_reshape_query_refuses(shape: tuple[int, ...], num_requests: int, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        reshape_query_for_spec_decode(torch.zeros(shape), num_requests)
    assert text in str(caught.value)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_decode_rows_equals_a_loop(
    lens: list[tuple[int, int]], width: int, dtype: torch.dtype
) -> None:
    block_table = torch.arange(len(lens) * width, dtype=torch.int32).view(len(lens), width)
    extents = [e for q, s in lens for e in row_extents(DraftMask.CAUSAL, q, s)]
    query_lens = torch.tensor([q for q, _ in lens], dtype=dtype)
    got = decode_rows(
        torch.tensor(extents, dtype=torch.int32), block_table, query_lens, len(extents)
    )
    want = [(s - q + 1 + t, request) for request, (q, s) in enumerate(lens) for t in range(q)]
    assert got.seq_lens.tolist() == [max(0, extent) for extent, _ in want]
    assert got.block_table.tolist() == [block_table[request].tolist() for _, request in want]
    assert got.seq_lens.dtype == got.block_table.dtype == torch.int32


def test_decode_rows_clamps_an_extent_below_zero() -> None:
    got = decode_rows(
        torch.tensor([-3, 2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([2]), 2,
    )  # fmt: skip
    assert got.seq_lens.tolist() == [0, 2]


@pytest.mark.parametrize("query_len", [2, 3, 4, 5, 8])
def test_decode_rows_attend_as_the_multi_token_batch_does(query_len: int) -> None:
    """Contexts 0, 1, 37 and 512: row t sees seq - (q - 1) + t keys."""
    lens = [(query_len, context + query_len) for context in (0, 1, 37, 512)]
    case = make_case(
        lens, num_heads=2, kv_lora_rank=16, rope_dim=8, page_size=16, dtype=torch.float64
    )
    part = case.tables()
    tables = decode_rows(
        part.row_extent, part.block_table, torch.full((4,), query_len), part.num_rows
    )
    assert tables.seq_lens.tolist() == [s - (q - 1) + t for q, s in lens for t in range(q)]
    rows = [
        r._replace(query_len=1, seq_len=r.seq_len - query_len + 1 + t)
        for r in case.requests
        for t in range(query_len)
    ]
    single = make_verify_part(rows, DraftMask.CAUSAL, page_size=16)
    got, want = (
        absorbed_mqa(case.q_latent, case.q_rope, case.latent_cache, p, softmax_scale=0.2)
        for p in (single, part)
    )
    torch.testing.assert_close(got.out, want.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.lse, want.lse)


@pytest.mark.parametrize("num_heads", [1, 12, 20, 40])
def test_pad_heads_keeps_rows_and_leaves_slack_behind_them(num_heads: int) -> None:
    query = torch.randn(3, 2 * num_heads, 8)[:, ::2]
    padded = pad_heads(query, 64)
    assert torch.equal(padded, query)
    assert padded.is_contiguous()
    assert padded.stride() == (num_heads * 8, 8, 1)
    tile_end = (2 * num_heads + 64) * 8  # a tile of 64 heads that starts at the last row
    assert padded.untyped_storage().nbytes() >= tile_end * padded.element_size()


def test_pad_heads_slack_changes_nothing() -> None:
    """A kernel that reads tiles of 16 heads and drops the surplus is the same for any slack."""
    query, keys = torch.randn(5, 12, 8, dtype=torch.float64), torch.randn(9, 8).double()
    want = torch.softmax(query @ keys.T, -1) @ keys
    for fill in (0.0, float("nan"), float("inf")):
        padded = pad_heads(query, 16)
        flat = padded.as_strided((padded.untyped_storage().nbytes() // 8,), (1,))
        flat[padded.numel() :] = fill
        tiles = padded.as_strided((5, 16, 8), padded.stride())
        got = (torch.softmax(tiles @ keys.T, -1) @ keys)[:, :12]
        assert torch.equal(padded, query)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_pad_heads_accepts_no_rows_and_no_slack() -> None:
    assert pad_heads(torch.zeros(0, 12, 8), 16).shape == (0, 12, 8)
    assert pad_heads(torch.ones(2, 16, 8), 16).sum() == 2 * 16 * 8


@pytest.mark.parametrize(("shape", "heads"), [((2, 12, 8), 11), ((2, 96), 128)])
def test_pad_heads_refuses(shape: tuple[int, ...], heads: int) -> None:
    with pytest.raises(ArgumentError, match=rf"num_heads_padded is {heads}.*\[T, H, D\]"):
        pad_heads(torch.zeros(shape), heads)
