"""Prompt attention over keys whose rotated part lies apart, and on from what rows have seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.backends.triton import TritonBackend
from specmla.errors import ArgumentError
from specmla.metadata import PrefillPart
from specmla.prompt_keys import PromptKeys
from specmla.testing import assert_attention_within_budget

SCALE = 0.2
LENS = [(5, 7), (0, 4), (34, 40), (3, 0), (9, 3)]
ROWS, KEYS = 51, 54
HEADS, NOPE, ROPE, VALUE = 3, 16, 8, 24


def make_part(lens: list[tuple[int, int]], device: torch.device) -> PrefillPart:
    query_lens, seq_lens = tuple(q for q, _ in lens), tuple(s for _, s in lens)
    starts = [
        torch.tensor([0, *torch.tensor(v).cumsum(0)], dtype=torch.int32, device=device)
        for v in (query_lens, seq_lens)
    ]
    return PrefillPart(*starts, torch.arange(sum(seq_lens), device=device), query_lens, seq_lens)


def draw(device: torch.device, dtype: torch.dtype, nope: int = NOPE) -> tuple[Tensor, PromptKeys]:
    """Draw queries, and keys and values as a projection leaves them: views of two buffers."""
    generator = torch.Generator().manual_seed(nope)
    query = torch.randn(ROWS, HEADS, nope + ROPE, generator=generator)
    expanded = torch.randn(KEYS, HEADS, nope + VALUE, generator=generator)
    rows = torch.randn(KEYS, 32 + ROPE, generator=generator)
    query, expanded, rows = (t.to(device, dtype) for t in (query, expanded, rows))
    return query, PromptKeys(expanded[..., :nope], rows[:, 32:], expanded[..., nope:])


def draw_held(device: torch.device) -> AttentionOutput:
    """Draw a state; that of every fourth row is empty, with values that must not be read."""
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(ROWS, HEADS, VALUE, generator=generator)
    lse = 3 * torch.randn(ROWS, HEADS, generator=generator)
    out[::4], lse[::4] = torch.nan, -torch.inf
    return AttentionOutput(out.to(device), lse.to(device))


def attend(backend: AttentionBackend, *given: Any, **options: Any) -> AttentionOutput:
    return backend.attend_keys(*given, softmax_scale=SCALE, **options)


def cast(keys: PromptKeys, dtype: torch.dtype) -> PromptKeys:
    assert keys.rope is not None
    return PromptKeys(keys.key.to(dtype), keys.rope.to(dtype), keys.value.to(dtype))


@pytest.mark.parametrize("nope", [NOPE, 12, 40], ids=["apart", "narrow", "no-power-of-two"])
def test_keys_apart_equal_joined_ones(nope: int, device: torch.device) -> None:
    query, keys = draw(device, torch.float32, nope)
    part = make_part(LENS, device)
    for causal in (True, False):
        got = attend(TritonBackend(), query, keys, part, causal=causal)
        wide = query.double(), cast(keys, torch.float64)
        exact = attend(ReferenceBackend(), *wide, part, causal=causal)
        plain = attend(ReferenceBackend(), query, keys, part, causal=causal)
        assert_attention_within_budget(got, exact, plain, plain.lse, score_width=nope + ROPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_held_is_merged(
    in_place: bool, causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    query, keys = draw(device, dtype)
    part, held, given = make_part(LENS, device), draw_held(device), draw_held(device)
    wide = AttentionOutput(held.out.double(), held.lse)
    exact = attend(
        ReferenceBackend(),
        query.double(),
        cast(keys, torch.float64),
        part,
        causal=causal,
        held=wide,
    )
    plain = attend(ReferenceBackend(), query, keys, part, causal=causal, held=draw_held(device))
    options: dict[str, Any] = {"causal": causal, "held": given, "in_place": in_place}
    got = attend(TritonBackend(), query, keys, part, **options)
    if in_place:
        assert got.out is given.out
        assert got.lse is given.lse
        assert got.out.dtype is torch.float32
    else:
        assert got.out.dtype is dtype
    assert_attention_within_budget(
        AttentionOutput(got.out.to(dtype), got.lse), exact, plain, plain.lse, score_width=24
    )


def test_rows_without_a_key_keep_what_is_held_to_the_bit(device: torch.device) -> None:
    query, keys = draw(device, torch.float16)
    part, held, given = make_part(LENS, device), draw_held(device), draw_held(device)
    attend(TritonBackend(), query, keys, part, held=given, in_place=True)
    unseeing = slice(39, 48)  # the request without keys, and rows before the first key of the last
    empty = held.lse[unseeing] == -torch.inf
    assert empty.any()
    assert torch.equal(given.lse[unseeing], held.lse[unseeing])
    assert torch.equal(given.out[unseeing][~empty], held.out[unseeing][~empty])
    assert not given.out[unseeing][empty].any()
    assert (given.lse[48:] != held.lse[48:]).all()


def test_an_empty_state_changes_no_bit(device: torch.device) -> None:
    query, keys = draw(device, torch.float16)
    part = make_part(LENS, device)
    nothing = AttentionOutput(
        torch.full((ROWS, HEADS, VALUE), torch.nan, device=device),
        torch.full((ROWS, HEADS), -torch.inf, device=device),
    )
    alone = attend(TritonBackend(), query, keys, part)
    after = attend(TritonBackend(), query, keys, part, held=nothing)
    assert torch.equal(after.out, alone.out)
    assert torch.equal(after.lse, alone.lse)


def test_keys_after_many_equal_ones_keep_their_weight_in_half_precision(
    device: torch.device,
) -> None:
    """A state of 2^16 keys: a weight relative to all of them is subnormal in float16."""
    part = make_part([(1, 64)], device)
    query = torch.zeros(1, 1, 24, device=device, dtype=torch.float16)
    key = torch.zeros(64, 1, 16, device=device, dtype=torch.float16)
    keys = PromptKeys(key, key[:, 0, :8], torch.ones_like(key) / 3)
    lse = torch.full((1, 1), 16.0, device=device).mul(torch.tensor(2.0).log().item())
    held = AttentionOutput(torch.zeros(1, 1, 16, device=device), lse)
    got = attend(TritonBackend(), query, keys, part, causal=False, held=held, in_place=True)
    want = keys.value[0, 0, 0].double() * 64 / (64 + 2**16)
    torch.testing.assert_close(got.out.double(), want.expand(1, 1, 16), rtol=1e-5, atol=0)


def test_strided_states_are_followed_and_neighbours_left_alone(device: torch.device) -> None:
    query, keys = draw(device, torch.float32)
    part, held, want = make_part(LENS, device), draw_held(device), draw_held(device)
    out = torch.full((ROWS + 4, 2 * HEADS, 40), 7.0, device=device)
    lse = torch.full((ROWS + 4, HEADS + 2), 7.0, device=device)
    given = AttentionOutput(out[2:-2, ::2, 8:32], lse[2:-2, :HEADS])
    given.out.copy_(held.out)
    given.lse.copy_(held.lse)
    attend(TritonBackend(), query, keys, part, held=given, in_place=True)
    attend(TritonBackend(), query, keys, part, held=want, in_place=True)
    assert torch.equal(given.out, want.out)
    assert torch.equal(given.lse, want.lse)
    given.out.fill_(7.0)
    given.lse.fill_(7.0)
    assert (out == 7.0).all()
    assert (lse == 7.0).all()


def test_all_that_disagrees_is_listed(device: torch.device) -> None:
    query, keys = draw(device, torch.float32)
    assert keys.rope is not None
    held, part = draw_held(device), make_part(LENS, device)
    wrong = AttentionOutput(held.out.half(), held.lse[1:])
    apart = PromptKeys(keys.key, keys.rope[1:, :4], keys.value)
    with pytest.raises(ArgumentError) as caught:
        attend(TritonBackend(), query, apart, part, held=wrong)
    for word in ("rope is (53, 4)", "key is", "held.out is", "held.lse is (50, 3)"):
        assert word in str(caught.value)
    with pytest.raises(ArgumentError, match="in_place"):
        attend(TritonBackend(), query, keys, part, in_place=True)
