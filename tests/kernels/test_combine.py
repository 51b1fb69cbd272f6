"""Merging the pieces of cut tiles; the launch table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.errors import UnsupportedError
from specmla.kernels import combine as combine_module
from specmla.kernels.combine import FEW_PIECES, combine
from specmla.kernels.direct import DirectKernel
from specmla.kernels.launch import LaunchEntry, find_entry, launch_table
from specmla.kernels.plan import CutRule, PiecePlan, PlanBounds, StepShape

BALANCED, FIXED = CutRule(), CutRule(piece_keys=64)
TILE = 16


def plan_of(outs: Tensor, lses: Tensor, pieces: list[int], rule: CutRule = BALANCED) -> PiecePlan:
    """Scatter [tiles, TILE, pieces, C] partials over slots, siblings side by side; the last tile
    has two rows less.
    """
    tiles, _, most, rank = outs.shape
    shape = StepShape(tiles * TILE - 2, tiles, 1, rank, 4)
    slots = max(2, tiles * most)
    partial_out = torch.full((slots, TILE, rank), math.nan, device=outs.device)
    partial_lse = torch.full((slots, TILE), math.nan, device=outs.device)
    records = [[tiles, max(pieces), *[77] * 6]]
    for tile, count in enumerate(pieces):
        for piece in range(count):
            partial_out[tile + piece * tiles] = outs[tile, :, piece]
            partial_lse[tile + piece * tiles] = lses[tile, :, piece]
        rows = TILE - 2 * (tile == tiles - 1)
        records.append([tile, tiles, count, tile * TILE, rows, 77, 77, 77])
    merges = torch.tensor(records, dtype=torch.int32, device=outs.device)
    return PiecePlan(
        shape,
        LaunchEntry(TILE, TILE, 16, 4, 1),
        rule,
        PlanBounds(tiles, slots, slots),
        merges[:0],
        merges,
        partial_out,
        partial_lse,
    )


def merged(plan: PiecePlan, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Combine into poisoned rows; gives all rows of the tiles, also the two that are not there."""
    rows = plan.bounds.tiles * TILE
    device = plan.partial_out.device
    out = torch.full((rows, 1, plan.shape.rank), math.nan, dtype=dtype, device=device)
    lse = torch.full((rows, 1), math.nan, device=device)
    combine(out, lse, plan)
    assert out[-2:].isnan().all()
    assert lse[-2:].isnan().all()
    return out[:, 0], lse[:, 0]


def random_partials(tiles: int, pieces: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(tiles, TILE, pieces, rank, generator=generator)
    return outs, 3 * torch.randn(tiles, TILE, pieces, generator=generator)


@pytest.mark.parametrize("rule", [BALANCED, FIXED], ids=["balanced", "fixed"])
@pytest.mark.parametrize(("pieces", "rank"), [(2, 32), (4, 512), (9, 256), (40, 128)])
def test_matches_float64(pieces: int, rank: int, rule: CutRule, device: torch.device) -> None:
    outs, lses = (t.to(device) for t in random_partials(3, pieces, rank, seed=pieces))
    counts = [pieces, 2, pieces - 1]  # slots past them hold NaN
    out, lse = merged(plan_of(outs, lses, counts, rule))
    for row in range(3 * TILE - 2):
        tile, lane = divmod(row, TILE)
        states = lses[tile, lane, : counts[tile]].double()
        exact_lse = states.logsumexp(-1)
        share = (states - exact_lse).exp()
        exact = (share[:, None] * outs[tile, lane, : counts[tile]].double()).sum(0)
        torch.testing.assert_close(out[row].double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[row].double(), exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [BALANCED, FIXED], ids=["balanced", "fixed"])
def test_empty_states_change_nothing(rule: CutRule, device: torch.device) -> None:  # BL-06
    outs, lses = (t.to(device) for t in random_partials(2, 3, 32, seed=1))
    only = outs[0, :, 1].clone()
    lses[0, :, [0, 2]] = -math.inf
    outs[0, :, [0, 2]] = math.nan  # whatever an empty piece's output holds
    lses[1] = -math.inf
    outs[1] = math.nan
    out, lse = merged(plan_of(outs, lses, [3, 3], rule))
    assert torch.equal(out[:TILE], only)
    assert torch.equal(lse[:TILE], lses[0, :, 1])
    assert (out[TILE:-2] == 0).all()
    assert (lse[TILE:-2] == -math.inf).all()


@pytest.mark.parametrize("extra", [1, 29, 40])
def test_pieces_without_keys_change_no_bit(extra: int, device: torch.device) -> None:
    """A row sees none of the last pieces of its tile if its mates see more than it does."""
    outs, lses = (t.to(device) for t in random_partials(1, 3 + extra, 64, seed=extra))
    lses[:, :, 3:], outs[:, :, 3:] = -math.inf, 0.0
    short = merged(plan_of(outs, lses, [3], FIXED))
    long = merged(plan_of(outs, lses, [3 + extra], FIXED))
    assert torch.equal(short[0][:-2], long[0][:-2])
    assert torch.equal(short[1][:-2], long[1][:-2])


def test_batch_mates_change_no_bit(device: torch.device) -> None:
    """With pieces of a fixed length the form of the merge must not follow the longest request."""
    outs, lses = (t.to(device) for t in random_partials(3, 40, 128, seed=5))
    alone = merged(plan_of(outs[:1], lses[:1], [6], FIXED))
    among = merged(plan_of(outs, lses, [6, 40, 2], FIXED))
    assert torch.equal(alone[0][:-2], among[0][: TILE - 2])
    assert torch.equal(alone[1][:-2], among[1][: TILE - 2])


def test_fixed_pieces_have_one_form_of_merge(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The interpreter adds in one order whatever the form, so that only the launch shows it."""
    forms = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **constants: forms.append(constants)

    monkeypatch.setattr(combine_module, "COMBINE", DirectKernel(Recorder()))
    for pieces in (2, 40):
        partials = [t.to(device) for t in random_partials(1, pieces, 32, seed=0)]
        for rule in (BALANCED, FIXED):
            merged(plan_of(partials[0], partials[1], [pieces], rule))
    balanced, fixed, other_balanced, other_fixed = forms
    assert balanced == other_balanced
    assert fixed == other_fixed
    assert (balanced["FEW"], fixed["FEW"]) == (FEW_PIECES, 0)


def test_order_of_pieces_does_not_matter(device: torch.device) -> None:  # BL-06
    outs, lses = (t.to(device) for t in random_partials(1, 3, 32, seed=3))
    order = [2, 0, 1]
    one = merged(plan_of(outs, lses, [3]))
    two = merged(plan_of(outs[:, :, order], lses[:, :, order], [3]))
    torch.testing.assert_close(one[0][:-2], two[0][:-2])
    torch.testing.assert_close(one[1][:-2], two[1][:-2])


def test_weights_are_natural(device: torch.device) -> None:  # BL-40
    outs = torch.zeros(1, TILE, 2, 32, device=device)
    outs[:, :, 0] = 1.0
    lses = torch.tensor([2.0, 1.0], device=device).expand(1, TILE, 2)
    out, _ = merged(plan_of(outs, lses, [2]))
    torch.testing.assert_close(out[:-2], torch.full_like(out[:-2], 0.7310586))


def test_huge_lse_does_not_overflow(device: torch.device) -> None:
    lses = torch.tensor([3e4, -3e4], device=device).expand(1, TILE, 2)
    outs = torch.ones(1, TILE, 2, 32, device=device)
    out, lse = merged(plan_of(outs, lses, [2]), torch.float16)
    assert (out[:-2] == 1).all()
    assert (lse[:-2] == 3e4).all()


def test_nothing_cut_writes_nothing(device: torch.device) -> None:
    plan = plan_of(*(t.to(device) for t in random_partials(1, 2, 32, seed=0)), [2])
    plan.merges[0, 0] = 0
    for bounds in (plan.bounds, PlanBounds(1, 2, 0)):
        out, lse = merged(dataclasses.replace(plan, bounds=bounds))
        assert out.isnan().all()
        assert lse.isnan().all()


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
