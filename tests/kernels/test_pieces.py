"""The device-side plan against a plain statement of it: cover, order, bounds, replays."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from specmla.kernels import plan as plan_module
from specmla.kernels.launch import Device, LaunchEntry
from specmla.kernels.pieces import fill_plan
from specmla.kernels.plan import (
    LEAST_RUN,
    PIECE_STEPS,
    CutRule,
    PiecePlan,
    StepShape,
    fitting_plan,
    max_waves,
    plan_bounds,
)

BALANCED = CutRule()
CLASSES = 8
WIDE = LaunchEntry(64, 64, 64, 8, 2)
NARROW = LaunchEntry(16, 16, 32, 4, 3, programs_per_sm=2)


class Step(NamedTuple):
    """Live rows and keys of each request, and how many heads."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    heads: int = 16

    def tiles(self, entry: LaunchEntry) -> list[int]:
        return [-(-q * self.heads // entry.block_m) for q in self.query_lens]

    def blocks(self, entry: LaunchEntry) -> list[int]:
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        return [-(-s // entry.block_n) if q else 0 for q, s in lens]


@pytest.fixture
def sms(monkeypatch: pytest.MonkeyPatch) -> int:
    """An H200's."""
    monkeypatch.setattr(plan_module, "describe_device", lambda device: Device("interpreter", 132))
    return 132


def fill(plan: PiecePlan, step: Step, *, one_row: bool = False) -> PiecePlan:
    device = plan.pieces.device
    starts = torch.tensor([0, *accumulate(step.query_lens)], dtype=torch.int32, device=device)
    lens = torch.tensor(step.seq_lens, dtype=torch.int32, device=device)
    fill_plan(plan, None if one_row else starts, lens)
    return plan


def make(
    step: Step,
    device: torch.device,
    entry: LaunchEntry = WIDE,
    rule: CutRule = BALANCED,
    *,
    rows: int = 0,
    table_keys: int = 0,
) -> PiecePlan:
    shape = StepShape(
        rows or sum(step.query_lens), len(step.query_lens), step.heads, rank=16, itemsize=2
    )
    plan = fitting_plan(None, shape, entry, rule, table_keys or max(step.seq_lens), device)
    plan.pieces.fill_(77)
    plan.merges.fill_(77)
    return fill(plan, step)


def live(plan: PiecePlan) -> list[list[int]]:
    """Records of the programs that have a piece; the others are marked and come last."""
    records: list[list[int]] = plan.pieces.tolist()
    count = sum(record[0] >= 0 for record in records)
    assert all(record[0] >= 0 for record in records[:count])
    assert all(record[0] == -1 for record in records[count:])
    return records[:count]


def merges(plan: PiecePlan) -> list[list[int]]:
    records: list[list[int]] = plan.merges.tolist()
    return [record[:5] for record in records[1 : 1 + records[0][0]]]


def even_cut(blocks: int, limit: int) -> tuple[int, int]:
    run = max(1, -(-blocks // max(1, -(-blocks // limit))))
    return max(1, -(-blocks // run)), run


def in_launch_order(cuts: list[tuple[int, int]], tiles: list[int], blocks: list[int]) -> list[int]:
    """Requests, the class of the longest pieces first."""
    runs = [min(run, b) for (_, run), b in zip(cuts, blocks, strict=True)]
    longest = max([0, *runs])
    return sorted(range(len(tiles)), key=lambda r: -(runs[r] * CLASSES // (longest + 1)))


def best_limit(tiles: list[int], blocks: list[int], resident: int, plan: PiecePlan) -> int:
    def count(limit: int, *, only_cut: bool = False) -> int:
        cuts = [even_cut(b, limit)[0] for b in blocks]
        return sum(t * n for t, n in zip(tiles, cuts, strict=True) if n > 1 or not only_cut)

    longest = max([LEAST_RUN, *blocks])
    first = max(1, -(-sum(tiles) // resident))
    limits = [longest]
    for extra in range(max_waves(plan.bounds.tiles, resident)):
        fitting = (
            limit
            for limit in range(LEAST_RUN, longest + 1)
            if count(limit) <= (first + extra) * resident
            and count(limit, only_cut=True) <= plan.bounds.slots
        )
        limits.append(next(fitting, longest))

    def cost(limit: int) -> int:
        cuts = [even_cut(b, limit) for b in blocks]
        order = in_launch_order(cuts, tiles, [run for _, run in cuts])
        pieces = [cuts[r][1] for r in order for _ in range(tiles[r] * cuts[r][0])]
        return sum(run + PIECE_STEPS for run in pieces[::resident])

    return min(limits, key=cost)


def plain_plan(step: Step, plan: PiecePlan, resident: int) -> tuple[list[list[int]], ...]:
    """State the plan in Python: records of the pieces and of the cut tiles."""
    entry, rule = plan.entry, plan.rule
    rest = plan.shape.rows - sum(step.query_lens)
    step = Step([*step.query_lens, rest], [*step.seq_lens, 0], step.heads)
    tiles, blocks = step.tiles(entry), step.blocks(entry)
    if rule.piece_keys is not None:
        run = rule.piece_keys // entry.block_n
        cuts = [(max(1, -(-b // run)), run) for b in blocks]
    elif rule.num_splits is not None:
        cuts = [even_cut(b, max(1, -(-b // rule.num_splits))) for b in blocks]
    else:
        limit = best_limit(tiles, blocks, resident, plan)
        cuts = [even_cut(b, limit) for b in blocks]
    first_rows = list(accumulate([0, *step.query_lens]))
    counts = [t * n for t, (n, _) in zip(tiles, cuts, strict=True)]
    first_slots = list(
        accumulate([0, *(c * (n > 1) for c, (n, _) in zip(counts, cuts, strict=True))])
    )
    pieces, cut_tiles = [], []
    for r in in_launch_order(cuts, tiles, blocks):
        parts, run = cuts[r]
        rows = [first_rows[r], step.query_lens[r], step.seq_lens[r]]
        for i in range(counts[r]):
            part, tile = divmod(i, tiles[r])
            slot = first_slots[r] + i if parts > 1 else -1
            pieces.append([r, tile, part, run, slot, *rows])
    for r, (parts, _) in enumerate(cuts):
        for tile in range(tiles[r] if parts > 1 else 0):
            packed = step.query_lens[r] * step.heads - tile * entry.block_m
            row = first_rows[r] * step.heads + tile * entry.block_m
            record = [first_slots[r] + tile, tiles[r], parts, row, min(packed, entry.block_m)]
            cut_tiles.append(record)
    return pieces, cut_tiles


def check_cover(plan: PiecePlan, step: Step) -> None:
    """Every step of every tile once, in order; slots once, within bounds, as the merges say."""
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    tiles, blocks = step.tiles(plan.entry), [*step.blocks(plan.entry), 0]
    for request, tile, piece, run, slot, *_ in live(plan):
        span = (piece * run, min((piece + 1) * run, blocks[request]), slot)
        found.setdefault((request, tile), []).append(span)
    wanted = {(r, t) for r, count in enumerate(tiles) for t in range(count)}
    assert {key for key in found if key[0] < len(tiles)} == wanted
    slots = [slot for pieces in found.values() for *_, slot in pieces if slot >= 0]
    assert len(slots) == len(set(slots)) <= plan.bounds.slots
    assert max([-1, *slots]) < plan.bounds.slots
    listed = [[r[0] + i * r[1] for i in range(r[2])] for r in merges(plan)]
    cut = [[slot for *_, slot in pieces] for pieces in found.values() if len(pieces) > 1]
    assert sorted(listed) == sorted(cut), "a cut tile is not merged, or in another order"
    for (request, _), pieces in found.items():
        assert pieces[0][0] == 0
        assert pieces[-1][1] == blocks[request]
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        assert (len(pieces) == 1) == (pieces[0][2] == -1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 3, 4, 8, 17]),
        st.one_of(st.sampled_from([0, 1, 63, 64, 65, 8191, 40_000]), st.integers(0, 3000)),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equals_the_plain_statement(data: st.DataObject, device: torch.device) -> None:
    lens = data.draw(STEPS)
    step = Step(*zip(*lens, strict=True), data.draw(st.sampled_from([1, 12, 16, 20, 40, 128])))
    entry = data.draw(st.sampled_from([WIDE, NARROW]))
    rule = data.draw(
        st.sampled_from([BALANCED, BALANCED, CutRule(num_splits=5), CutRule(piece_keys=512)])
    )
    rows = sum(step.query_lens) + data.draw(st.sampled_from([0, 5]))
    with pytest.MonkeyPatch.context() as patch:
        count = data.draw(st.sampled_from([3, 8, 132]))
        patch.setattr(plan_module, "describe_device", lambda d: Device("interpreter", count))
        plan = make(step, device, entry, rule, rows=max(rows, 1))
        pieces, cut_tiles = plain_plan(step, plan, count * entry.programs_per_sm)
    assert live(plan) == pieces
    assert merges(plan) == cut_tiles
    check_cover(plan, step)


@pytest.mark.parametrize(
    ("entry", "step", "pieces"),
    [
        (WIDE, Step([4] * 32, [8192] * 32), 4),
        (WIDE, Step([4], [4096]), 32),
        (WIDE, Step([4], [131_072]), 128),
        (WIDE, Step([4] * 128, [4096] * 128), 1),
        (WIDE, Step([4] * 128, [8192] * 128), 1),
        (WIDE, Step([2] * 32, [8192] * 32, heads=128), 1),
        (NARROW, Step([1] * 32, [8192] * 32), 8),
    ],
)
def test_counts_that_were_fastest_on_an_h200(
    entry: LaunchEntry, step: Step, pieces: int, sms: int, device: torch.device
) -> None:
    plan = make(step, device, entry)
    assert len(live(plan)) == pieces * sum(step.tiles(entry))
    assert len(merges(plan)) == (sum(step.tiles(entry)) if pieces > 1 else 0)


def finish(plan: PiecePlan, resident: int) -> int:
    """Steps until the last program ends, started in order as others end."""
    running = [0] * resident
    for _, _, piece, run, _, _, _, keys in live(plan):
        steps = min(run, -(-keys // plan.entry.block_n) - piece * run)
        heapq.heapreplace(running, running[0] + steps + PIECE_STEPS)
    return max(running)


@pytest.mark.parametrize(
    "step",
    [
        Step([1 + i % 8 for i in range(32)], [8192] * 32),
        Step([1 + i % 4 for i in range(32)], [8192] * 32, heads=128),
        Step([4] * 32, [65_536] + [1024] * 31),
        Step([4] * 512, [1024] * 511 + [65_536]),
        Step([4] * 128, [1024, 8192] * 64),
        Step([4] * 3, [131_072, 8192, 64]),
    ],
    ids=["ragged", "128-heads", "one-64k", "one-64k-of-512", "two-lengths", "few"],
)
def test_mixed_work_is_balanced(step: Step, sms: int, device: torch.device) -> None:
    plan = make(step, device)
    check_cover(plan, step)
    tiles, blocks = step.tiles(WIDE), step.blocks(WIDE)
    whole = sum(t * (b + PIECE_STEPS) for t, b in zip(tiles, blocks, strict=True)) / sms
    assert finish(plan, sms) <= 1.35 * whole + 2 * PIECE_STEPS


def test_siblings_stand_side_by_side_with_the_same_cuts(sms: int, device: torch.device) -> None:
    plan = make(Step([10, 3], [9000, 70_000]), device)
    for r, tiles in ((0, 3), (1, 1)):
        mine = [record for record in live(plan) if record[0] == r]
        groups = [mine[i : i + tiles] for i in range(0, len(mine), tiles)]
        assert all([record[1] for record in group] == list(range(tiles)) for group in groups)
        assert all(len({tuple(record[2:4]) for record in group}) == 1 for group in groups)


@pytest.mark.parametrize("rule", [BALANCED, CutRule(num_splits=3), CutRule(piece_keys=1024)])
def test_replays_follow_rows_requests_and_lengths(
    rule: CutRule, sms: int, device: torch.device
) -> None:  # BL-18, BL-20
    captured = Step([4] * 8, [64] * 8)
    plan = make(captured, device, rule=rule, table_keys=40_000)
    steps = [
        Step([4] * 5 + [0] * 3, [1, 64, 65, 700, 3, 0, 0, 0]),
        Step([4] * 8, [1] * 8),
        Step([7, 1, 0, 12, 3, 9, 0, 0], [40_000, 3, 500, 0, 8191, 20_000, 64, 64]),
        Step([0] * 8, [0] * 8),
        Step([4] * 8, [40_000] * 8),
        Step([4] * 5 + [0] * 3, [1, 64, 65, 700, 3, 0, 0, 0]),
    ]
    for step in steps:
        assert fill(plan, step) is plan
        fresh = make(step, device, rule=rule, rows=32, table_keys=40_000)
        assert live(plan) == live(fresh)
        assert merges(plan) == merges(fresh)
        check_cover(plan, step)
        nobody = 32 - sum(step.query_lens)
        rest = [record for record in live(plan) if record[0] == 8]
        assert len(rest) == -(-nobody * 16 // 64), "rows of no request must become empty states"
        assert all(record[4:] == [-1, 32 - nobody, nobody, 0] for record in rest)


def test_one_row_a_request(sms: int, device: torch.device) -> None:
    step = Step([1] * 6, [900, 0, 64, 70_000, 1, 65], heads=40)
    plan = make(step, device, NARROW)
    expected, cut = live(plan), merges(plan)
    plan.pieces.fill_(77)
    fill(plan, step, one_row=True)
    assert live(plan) == expected
    assert merges(plan) == cut
    check_cover(plan, step)


@settings(max_examples=200)
@given(
    rows=st.integers(0, 3000),
    requests=st.integers(1, 512),
    heads=st.integers(1, 128),
    table_keys=st.integers(0, 200_000),
    resident=st.sampled_from([4, 132, 264]),
    data=st.data(),
)
def test_bounds(
    rows: int, requests: int, heads: int, table_keys: int, resident: int, data: st.DataObject
) -> None:
    entry = data.draw(st.sampled_from([WIDE, NARROW]))
    shape = StepShape(rows, requests, heads, 512, 2)
    bounds = plan_bounds(shape, entry, BALANCED, table_keys, resident)
    assert bounds.slots <= 3 * resident, "scratch is O(SMs)"
    assert bounds.programs <= bounds.tiles + 3 * resident, "programs are O(tiles + SMs)"
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=min(requests, 40) - 1)))
    lens = [b - a for a, b in pairwise([0, *cuts, rows])]
    needed = sum(-(-q * heads // entry.block_m) for q in lens)
    assert bounds.tiles >= needed, "some way to share the rows out does not fit"
    fixed = plan_bounds(shape, entry, CutRule(piece_keys=1024), table_keys, resident)
    assert fixed.programs == bounds.tiles * max(1, -(-table_keys // 1024))


def test_fitting_plan_is_used_again(device: torch.device) -> None:
    plan = make(Step([4], [300]), device)
    again = fitting_plan(plan, plan.shape, WIDE, BALANCED, 300, device)
    assert again is plan
    for changed in (
        fitting_plan(plan, plan.shape, NARROW, BALANCED, 300, device),
        fitting_plan(plan, plan.shape, WIDE, CutRule(piece_keys=64), 300, device),
        fitting_plan(plan, plan.shape, WIDE, BALANCED, 100_000, device),
        fitting_plan(plan, StepShape(5, 1, 16, 16, 2), WIDE, BALANCED, 300, device),
        fitting_plan("another", plan.shape, WIDE, BALANCED, 300, device),
    ):
        assert changed is not plan
