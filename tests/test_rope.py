"""Rotary angles: the two layouts, relative positions, far positions, YaRN's ramp."""

from __future__ import annotations

import math

import pytest
import torch

from specmla.config import MLAConfig, YarnScaling
from specmla.rope import RotaryEmbedding, rotary_frequencies

EXACT = {"rtol": 0.0, "atol": 1e-12}


def config(
    rope_dim: int = 64, interleave: bool = True, scaling: YarnScaling | None = None
) -> MLAConfig:
    return MLAConfig(
        hidden_size=8,
        num_heads=3,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=rope_dim,
        v_head_dim=4,
        rope_interleave=interleave,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("rope_dim", [2, 32, 64])
def test_interleaved_equals_permuted_halves(rope_dim: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(5, 3, rope_dim).double(), torch.randn(5, rope_dim).double()
    to_halves = torch.arange(rope_dim).view(-1, 2).T.flatten()
    positions = torch.tensor([0, 1, 7, 1000, 163839])
    pairs = RotaryEmbedding(config(rope_dim)).at(positions, torch.float64)
    halves = RotaryEmbedding(config(rope_dim, False)).at(positions, torch.float64)
    q, k = pairs.rotate_query(query), pairs.rotate_key(key)
    q_halves = halves.rotate_query(query[..., to_halves])
    k_halves = halves.rotate_key(key[..., to_halves])
    torch.testing.assert_close(q[..., to_halves], q_halves, **EXACT)
    torch.testing.assert_close(k[..., to_halves], k_halves, **EXACT)
    scores = torch.einsum("qhr,kr->qhk", q, k)
    torch.testing.assert_close(scores, torch.einsum("qhr,kr->qhk", q_halves, k_halves), **EXACT)
    # Permuting one of the two only is the mistake this guards against.
    if rope_dim > 2:
        assert (scores - torch.einsum("qhr,kr->qhk", q, k_halves)).abs().max() > 0.1


@pytest.mark.parametrize("interleave", [True, False])
def test_scores_depend_on_the_distance_only(interleave: bool) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(1, 1, 64).double(), torch.randn(1, 64).double()
    rope = RotaryEmbedding(config(interleave=interleave))
    scores = []
    for at, other in ((5, 3), (7, 5), (1000, 998), (7, 4)):
        turned = rope.at(torch.tensor([at]), torch.float64).rotate_query(query)[0, 0]
        scores.append(turned @ rope.at(torch.tensor([other]), torch.float64).rotate_key(key)[0])
    torch.testing.assert_close(torch.stack(scores[1:3]), torch.stack([scores[0]] * 2), **EXACT)
    assert abs(scores[3] - scores[0]) > 0.01


def test_rotation_written_out() -> None:
    x = torch.tensor([[3.0, -2.0, 0.5, 4.0]]).double()
    got = RotaryEmbedding(config(4)).at(torch.tensor([11]), torch.float64).rotate_key(x)[0]
    for pair, turn in ((0, 11.0), (1, 11.0 / 100.0)):
        a, b = x[0, 2 * pair].item(), x[0, 2 * pair + 1].item()
        assert got[2 * pair] == pytest.approx(a * math.cos(turn) - b * math.sin(turn), abs=1e-14)
        assert got[2 * pair + 1] == pytest.approx(
            b * math.cos(turn) + a * math.sin(turn), abs=1e-14
        )


def test_far_positions_are_exact_in_float32() -> None:
    """Angles are reduced in float64: at position 1e6 float32 would be off by 3e-2 radians."""
    at = RotaryEmbedding(config(8)).at(torch.tensor([1_000_003]), torch.float32)
    want = [math.cos(1_000_003 * 10000 ** (-2 * i / 8)) for i in range(4)]
    assert at.cos.dtype == torch.float32
    torch.testing.assert_close(
        at.cos[0, ::2].double(), torch.tensor(want).double(), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_types_are_rotated_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 64).to(dtype)
    positions = torch.tensor([0, 9, 4000])
    got = RotaryEmbedding(config()).at(positions, dtype).rotate_key(x)
    exact = RotaryEmbedding(config()).at(positions, torch.float64).rotate_key(x.double())
    assert got.dtype == dtype
    # One rounding of the result, and in float32 three roundings before it.
    unit = max(torch.finfo(dtype).eps, 2.0**-52) / 2
    bound = exact.abs() * unit + (0 if dtype == torch.float64 else 16 * 2.0**-24) + 1e-14
    assert ((got.double() - exact).abs() <= bound).all()


def test_strided_input_and_batched_positions() -> None:
    torch.manual_seed(3)
    wide = torch.randn(2, 5, 3, 96).double()
    at = RotaryEmbedding(config()).at(torch.arange(5), torch.float64)
    got = at.rotate_query(wide[..., 32:])
    for b in range(2):
        torch.testing.assert_close(
            got[b], at.rotate_query(wide[b, :, :, 32:].contiguous()), **EXACT
        )


@pytest.mark.parametrize("interleave", [True, False])
def test_no_rotated_part(interleave: bool) -> None:
    at = RotaryEmbedding(config(0, interleave)).at(torch.arange(5), torch.float32)
    assert at.rotate_query(torch.empty(5, 3, 0)).shape == (5, 3, 0)
    assert at.rotate_key(torch.empty(5, 0)).shape == (5, 0)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain = rotary_frequencies(64, 10000.0, None)
    yarn = rotary_frequencies(64, 10000.0, YarnScaling(40.0, 4096))
    turns = plain * 4096 / (2 * math.pi)
    torch.testing.assert_close(yarn[turns > 32 * 1.4], plain[turns > 32 * 1.4], **EXACT)
    torch.testing.assert_close(yarn[turns < 1 / 1.4], plain[turns < 1 / 1.4] / 40, **EXACT)
    between = (turns < 30) & (turns > 1.1)
    assert between.sum() >= 8
    assert ((yarn < plain) & (yarn > plain / 40))[between].all()
    assert (yarn.diff() < 0).all()


def test_yarn_without_extension_changes_nothing() -> None:
    same = rotary_frequencies(32, 10000.0, YarnScaling(1.0, 4096))
    torch.testing.assert_close(same, rotary_frequencies(32, 10000.0, None), **EXACT)


def test_yarn_factor_multiplies_query_and_key() -> None:
    x = torch.ones(1, 64).double()
    position = torch.tensor([5])
    plain = YarnScaling(40.0, 4096, attention_factor=1.0)
    doubled = YarnScaling(40.0, 4096, attention_factor=2.0)
    got, once = (
        RotaryEmbedding(config(scaling=s)).at(position, torch.float64).rotate_key(x)
        for s in (doubled, plain)
    )
    torch.testing.assert_close(got, 2 * once, **EXACT)
