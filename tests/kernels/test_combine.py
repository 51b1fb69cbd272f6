"""Merging splits, the ranges they are cut by, and the rule that chooses how many."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from specmla.errors import UnsupportedError
from specmla.kernels.combine import combine
from specmla.kernels.launch import (
    LEAST_RUN,
    MAX_WAVES,
    SplitPlan,
    choose_num_splits,
    find_entry,
    launch_table,
    reserve,
)
from specmla.kernels.prims import live_splits, split_length

BLOCK = 16


@triton.jit
def ranges_kernel(out_ptr, num_keys, num_splits, BLOCK: tl.constexpr):
    tl.store(out_ptr, split_length(num_keys, num_splits, BLOCK))
    tl.store(out_ptr + 1, live_splits(num_keys, num_splits, BLOCK))


@pytest.mark.parametrize("num_keys", [0, 1, 15, 16, 17, 65, 700])
def test_splits_cover_all_keys_once(num_keys: int, device: torch.device) -> None:  # BL-15
    for num_splits in (1, 2, 3, 4, 16, 50):
        found = torch.zeros(2, dtype=torch.int32, device=device)
        ranges_kernel[(1,)](found, num_keys, num_splits, BLOCK=BLOCK, enable_fp_fusion=False)
        run, live = found.tolist()
        assert run % BLOCK == 0
        assert live <= num_splits
        covered = [k for s in range(live) for k in range(s * run, min((s + 1) * run, num_keys))]
        assert covered == list(range(num_keys))
        assert all(s * run < num_keys for s in range(live))


def merged(
    outs: torch.Tensor, lses: torch.Tensor, live: list[int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine [T, H, splits, C] partials of T one-row requests with `live` splits each."""
    num_rows, num_heads, num_splits, rank = outs.shape
    out = torch.full((num_rows, num_heads, rank), math.nan, dtype=dtype, device=outs.device)
    lse = torch.full((num_rows, num_heads), math.nan, device=outs.device)
    # Lengths of `n * num_splits` steps would fill every split; fewer leave the last ones dead.
    lens = torch.tensor([n * BLOCK for n in live], dtype=torch.int32, device=outs.device)
    plan = SplitPlan(num_splits, outs, lses)
    combine(out, lse, plan, BLOCK, None, lens, 1)
    return out, lse


@pytest.mark.parametrize(("num_splits", "rank"), [(2, 32), (4, 512), (9, 256), (40, 128)])
def test_matches_float64(num_splits: int, rank: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_splits)
    outs = torch.randn(3, 2, num_splits, rank, generator=generator).to(device)
    lses = (3 * torch.randn(3, 2, num_splits, generator=generator)).to(device)
    live = [num_splits, 1, num_splits - 1]
    for row, n in enumerate(live):  # dead splits hold anything
        outs[row, :, n:], lses[row, :, n:] = math.nan, math.nan
    out, lse = merged(outs, lses, live)
    for row, n in enumerate(live):
        states = lses[row, :, :n].double()
        exact_lse = states.logsumexp(-1)
        share = (states - exact_lse[:, None]).exp()
        exact = (share[..., None] * outs[row, :, :n].double()).sum(1)
        torch.testing.assert_close(out[row].double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[row].double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_empty_states_change_nothing(device: torch.device) -> None:  # BL-06
    outs = torch.randn(3, 1, 3, 32, device=device)
    lses = torch.tensor([[[1.5, -2.0, 0.25]]], device=device).repeat(3, 1, 1)
    only = outs[0, 0, 1].clone()
    lses[0, 0, [0, 2]] = -math.inf
    outs[0, 0, [0, 2]] = math.nan  # whatever an empty split's output holds
    lses[1] = -math.inf
    outs[1] = math.nan
    out, lse = merged(outs, lses, [3, 3, 0])
    assert torch.equal(out[0, 0], only)
    assert lse[0, 0] == -2.0
    assert (out[1:] == 0).all()
    assert (lse[1:] == -math.inf).all()


def test_order_of_splits_does_not_matter(device: torch.device) -> None:  # BL-06
    outs, lses = torch.randn(1, 1, 3, 32, device=device), torch.randn(1, 1, 3, device=device)
    order = [2, 0, 1]
    one, two = merged(outs, lses, [3]), merged(outs[:, :, order], lses[:, :, order], [3])
    torch.testing.assert_close(one[0], two[0])
    torch.testing.assert_close(one[1], two[1])


def test_weights_are_natural(device: torch.device) -> None:  # BL-40
    outs = torch.zeros(1, 1, 2, 32, device=device)
    outs[0, 0, 0] = 1.0
    out, _ = merged(outs, torch.tensor([[[2.0, 1.0]]], device=device), [2])
    torch.testing.assert_close(out, torch.full_like(out, 0.7310586))


def test_huge_lse_does_not_overflow(device: torch.device) -> None:
    outs = torch.ones(1, 1, 2, 32, device=device)
    out, lse = merged(outs, torch.tensor([[[3e4, -3e4]]], device=device), [2], torch.float16)
    assert (out == 1).all()
    assert (lse == 3e4).all()


@given(num_tiles=st.integers(0, 600), num_steps=st.integers(0, 5000), slots=st.integers(1, 300))
def test_split_rule_is_bounded(num_tiles: int, num_steps: int, slots: int) -> None:
    splits = choose_num_splits(num_tiles, num_steps, slots)
    assert splits >= 1
    assert splits == 1 or num_tiles * splits <= MAX_WAVES * slots, "scratch is O(tiles + SMs)"
    assert splits == 1 or num_steps // splits >= LEAST_RUN - 1
    run = -(-num_steps // splits)
    assert splits == 1 or (splits - 1) * run < num_steps, "the last split would be empty"


def test_split_rule_on_measured_shapes() -> None:
    """The counts that were fastest on one H200 (132 SMs), tiles of 64 rows, steps of 64 keys."""
    assert choose_num_splits(32, 128, 132) == 4
    assert choose_num_splits(1, 2048, 132) == 128
    assert choose_num_splits(128, 64, 132) == 1
    assert choose_num_splits(128, 128, 132) == 1
    assert choose_num_splits(1, 64, 132) == 32
    assert choose_num_splits(32, 256, 264) == 8  # 16-row tiles: steps of 32, two programs an SM


def test_unsplit_needs_no_scratch(device: torch.device) -> None:
    assert reserve(1, (4, 3, 32), device) == SplitPlan(1, None, None)
    plan = reserve(3, (4, 3, 32), device)
    assert plan.partial_out is not None
    assert plan.partial_out.shape == (4, 3, 3, 32)


def test_every_architecture_has_every_kernel() -> None:
    for arch in launch_table():
        for kernel in ("packed", "rows", "prefill"):
            for itemsize in (2, 4):
                for size in (1, 16, 17, 33, 64, 10_000):
                    for page in (16, 32, 64, 128):
                        entry = find_entry(kernel, arch, size, itemsize, page)
                        assert page % entry.page_multiple == 0


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_75"):
        find_entry("packed", "sm_75", 16, 2, 64)
