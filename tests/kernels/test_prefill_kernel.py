"""Prompt attention by Triton against the reference in float64, for any head width."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.reference import ReferenceBackend
from specmla.backends.triton import TritonBackend
from specmla.errors import ArgumentError
from specmla.kernels.head_widths import key_parts, value_pad
from specmla.metadata import PrefillPart
from specmla.testing import assert_attention_within_budget

SCALE = 0.2


def make_part(lens: list[tuple[int, int]], device: torch.device) -> PrefillPart:
    query_lens, seq_lens = tuple(q for q, _ in lens), tuple(s for _, s in lens)
    starts = [
        torch.tensor([0, *accumulate(v)], dtype=torch.int32, device=device)
        for v in (query_lens, seq_lens)
    ]
    slots = torch.arange(sum(seq_lens), device=device)
    return PrefillPart(starts[0], starts[1], slots, query_lens, seq_lens)


def check(
    lens: list[tuple[int, int]],
    dims: tuple[int, int],
    device: torch.device,
    *,
    num_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
) -> None:
    part = make_part(lens, device)
    generator = torch.Generator().manual_seed(len(lens))
    rows, keys = sum(part.query_lens), sum(part.seq_lens)
    query, key, value = (
        torch.randn(n, num_heads, d, generator=generator).to(device, dtype)
        for n, d in ((rows, dims[0]), (keys, dims[0]), (keys, dims[1]))
    )

    def run(backend: TritonBackend | ReferenceBackend, as_dtype: torch.dtype) -> object:
        return backend.forward_mha(
            query.to(as_dtype),
            key.to(as_dtype),
            value.to(as_dtype),
            part,
            softmax_scale=SCALE,
            causal=causal,
        )

    plain = run(ReferenceBackend(), dtype)
    exact = run(ReferenceBackend(), torch.float64)
    single = run(ReferenceBackend(), torch.float32)
    got = run(TritonBackend(), dtype)
    assert_attention_within_budget(got, exact, plain, single.lse, score_width=query.shape[-1])  # type: ignore[attr-defined,arg-type]


@pytest.mark.parametrize(
    "dims", [(192, 128), (256, 256), (96, 64), (24, 16), (40, 24), (16, 8), (64, 64)]
)
def test_head_widths(dims: tuple[int, int], device: torch.device) -> None:
    check([(5, 5), (3, 40)], dims, device)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_lengths(causal: bool, device: torch.device) -> None:
    lens = [(1, 1), (33, 33), (0, 5), (2, 64), (40, 65), (31, 32)]
    check(lens, (24, 16), device, causal=causal)


def test_more_rows_than_keys(device: torch.device) -> None:
    check([(40, 3), (2, 0), (3, 9)], (16, 16), device)


@pytest.mark.parametrize("num_heads", [1, 3, 20])
def test_head_counts_in_half_precision(num_heads: int, device: torch.device) -> None:
    check([(7, 12), (9, 9)], (24, 16), device, num_heads=num_heads, dtype=torch.float16)


def test_neighbours_do_not_leak(device: torch.device) -> None:
    part = make_part([(3, 20), (3, 20)], device)
    query, key, value = (torch.randn(n, 2, 16, device=device) for n in (6, 40, 40))
    backend = TritonBackend()
    before = backend.forward_mha(query, key, value, part, softmax_scale=SCALE)
    key[20:], value[20:] = float("nan"), float("nan")
    after = backend.forward_mha(query, key, value, part, softmax_scale=SCALE)
    assert torch.equal(after.out[:3], before.out[:3])
    assert torch.equal(after.lse[:3], before.lse[:3])


def test_strided_inputs(device: torch.device) -> None:
    part = make_part([(4, 18)], device)
    wide = torch.randn(2, 18, 80, device=device).transpose(0, 1)
    query, key, value = wide[:4, :, :24], wide[:, :, 24:48], wide[:, :, 48:64]
    backend = TritonBackend()
    got = backend.forward_mha(query, key, value, part, softmax_scale=SCALE)
    copies = (t.contiguous() for t in (query, key, value))
    expected = backend.forward_mha(*copies, part, softmax_scale=SCALE)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def test_no_rows(device: torch.device) -> None:
    part = make_part([(0, 4)], device)
    empty, keys = torch.randn(0, 2, 16, device=device), torch.randn(4, 2, 16, device=device)
    got = TritonBackend().forward_mha(empty, keys, keys, part, softmax_scale=SCALE)
    assert got.out.shape == (0, 2, 16)


def test_width_parts() -> None:
    assert [key_parts(d) for d in (192, 256, 96, 24, 16, 8, 40, 100)] == [
        (128, 64),
        (256, 0),
        (64, 32),
        (16, 16),
        (16, 0),
        (16, 0),
        (32, 16),
        (64, 64),
    ]
    assert [value_pad(d) for d in (128, 8, 24, 17)] == [128, 16, 32, 32]


def test_wrong_shapes_are_listed(device: torch.device) -> None:
    part = make_part([(4, 6)], device)
    query, key = torch.randn(3, 2, 16, device=device), torch.randn(6, 1, 16, device=device)
    with pytest.raises(ArgumentError, match="query") as caught:
        TritonBackend().forward_mha(query, key, key[:5].half(), part, softmax_scale=SCALE)
    for word in ("key is", "value is", "dtypes"):
        assert word in str(caught.value)
