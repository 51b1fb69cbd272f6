from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.backends.reference import PREFILL_ROWS, ReferenceBackend
from specmla.errors import ArgumentError
from specmla.metadata import PrefillPart
from specmla.testing import (
    assert_attention_within_budget,
)

BACKEND = ReferenceBackend()
EMPTY = -math.inf


def prompt_part(lens: list[tuple[int, int]]) -> PrefillPart:
    query_lens, seq_lens = zip(*lens, strict=True)
    starts = [
        torch.tensor(list(itertools.accumulate(x, initial=0)), dtype=torch.int32)
        for x in (query_lens, seq_lens)
    ]
    return PrefillPart(*starts, torch.zeros(sum(seq_lens), dtype=torch.int64), query_lens, seq_lens)


def written_out_mha(
    query: Tensor, key: Tensor, value: Tensor, part: PrefillPart, scale: float, causal: bool
) -> AttentionOutput:
    """One row and head at a time, in the dtype of the query."""
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full(query.shape[:2], EMPTY, dtype=wide)
    row = first = 0
    for query_len, seq_len in zip(part.query_lens, part.seq_lens, strict=True):
        for t in range(query_len):
            count = seq_len - query_len + 1 + t if causal else seq_len
            for head in range(query.shape[1]) if count > 0 else ():
                keys = slice(first, first + count)
                score = (key[keys, head] @ query[row, head]) * scale
                out[row, head] = score.softmax(0) @ value[keys, head]
                lse[row, head] = score.to(wide).logsumexp(0)
            row += 1
        first += seq_len
    return AttentionOutput(out, lse.float())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_dim", [24, 8, 40])
def test_forward_mha_equals_rows_written_out(v_dim: int, dtype: torch.dtype, causal: bool) -> None:
    """Whole prompts, chunks with context, no keys at all, fewer keys than rows."""
    part = prompt_part([(5, 5), (3, 20), (1, 1), (2, 0), (4, 2)])
    draw = torch.Generator().manual_seed(v_dim)
    query, key, value = (
        torch.randn(n, 3, d, generator=draw, dtype=torch.float64).to(dtype)
        for n, d in ((15, 24), (28, 24), (28, v_dim))
    )
    got = BACKEND.forward_mha(query, key, value, part, softmax_scale=0.2, causal=causal)
    wide = torch.promote_types(dtype, torch.float32)
    exact, plain, lse = (
        written_out_mha(query.to(d), key.to(d), value.to(d), part, 0.2, causal)
        for d in (torch.float64, dtype, wide)
    )
    assert got.out.dtype is dtype
    assert_attention_within_budget(got, exact, plain, lse.lse, score_width=24)


@pytest.mark.parametrize("query_len", [PREFILL_ROWS - 1, PREFILL_ROWS, 2 * PREFILL_ROWS + 3])
def test_forward_mha_in_blocks_equals_torch(query_len: int) -> None:
    part = prompt_part([(query_len, query_len), (2, 3)])
    query, key, value = (
        torch.randn(query_len + n, 2, d, dtype=torch.float64) for n, d in ((2, 8), (3, 8), (3, 4))
    )
    got = BACKEND.forward_mha(query, key, value, part, softmax_scale=0.3).out
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x[:query_len].transpose(0, 1) for x in (query, key, value)), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(got[:query_len], want.transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_forward_mha_reads_strided_views() -> None:
    part = prompt_part([(3, 5)])
    wide = torch.randn(5, 2, 30)
    query, key, value = wide[:3, :, :8], wide[..., 8:16], wide[..., 16:30]
    got = BACKEND.forward_mha(query, key, value, part, softmax_scale=0.3)
    packed = (x.contiguous() for x in (query, key, value))
    want = BACKEND.forward_mha(*packed, part, softmax_scale=0.3)
    torch.testing.assert_close(got.out, want.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-6)


def test_forward_mha_lists_all_that_disagrees() -> None:
    with pytest.raises(ArgumentError) as caught:
        BACKEND.forward_mha(
            torch.zeros(2, 3, 8), torch.zeros(5, 3, 7), torch.zeros(4, 3, 8).double(),
            prompt_part([(3, 5)]), softmax_scale=1.0,
        )  # fmt: skip
    wanted = ["accepted is [T=3, H, P + R]", "key is (5, 3, 7)", "value is (4, 3, 8)", "one dtype"]
    assert [text for text in wanted if text not in str(caught.value)] == []
