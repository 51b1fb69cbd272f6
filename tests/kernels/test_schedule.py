"""The device-side plan, interpreted: every block of every tile once, cuts listed, loads even."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton

from specmla.kernels.hopper.plan import lanes_for
from specmla.kernels.schedule import schedule_kernel

FIXED = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Plan(NamedTuple):
    """Records of a plan, and what it was made from."""

    query_lens: list[int]
    seq_lens: list[int]
    heads: int
    run: int
    programs: list[list[int]]
    entries: list[list[int]]
    merges: list[list[int]]

    def tiles(self, request: int) -> int:
        return -(-self.query_lens[request] * self.heads // 64)

    def blocks(self, request: int) -> int:
        return -(-self.seq_lens[request] // 64)


def make_plan(
    query_lens: list[int], seq_lens: list[int], heads: int, programs: int, run: int = 0
) -> Plan:
    tiles = sum(-(-q * heads // 64) for q in query_lens)
    page_size = 64 if heads != 40 else 16
    cells = max(1, -(-max(seq_lens) // page_size))
    table = torch.arange(len(query_lens) * cells, dtype=torch.int32).view(-1, cells) * 3 + 1
    for request, keys in enumerate(seq_lens):
        table[request, -(-keys // page_size) :] = 2**31 - 1
    shapes = ((programs, 16), (3 * len(query_lens) + 1, 8), (1 + max(programs, tiles), 8))
    records = [torch.full(shape, -7, dtype=torch.int32, device=DEVICE) for shape in shapes]
    schedule_kernel[(1,)](
        torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        *records,
        table.to(DEVICE),
        table.stride(0),
        len(query_lens),
        H=heads,
        PROGRAMS=programs,
        FIXED=FIXED,
        MIN_BLOCKS=2,
        MERGE_COST=5,
        RUN=run,
        G=page_size,
        BLOCK_B=lanes_for(len(query_lens)),
        BLOCK_P=triton.next_power_of_2(programs),
    )
    program, entry, merge = (r.tolist() for r in records)
    for record in program:
        check_pages(record, seq_lens, table, page_size)
    merges = merge[1 : 1 + merge[0][0]]
    items = [merge_items(pieces, live, run) for _, _, _, pieces, _, live, *_ in merges]
    wide = sum(items) > 4 * programs and not run
    assert merge[0][2] == wide
    if wide:
        items = [merge_items(pieces, live, run, wide) for _, _, _, pieces, _, live, *_ in merges]
    assert [record[6] for record in merges] == [sum(items[:i]) for i in range(len(items))]
    assert [record[7] for record in merges] == items
    assert merge[0][1] == sum(items)
    return Plan(query_lens, seq_lens, heads, run, program, entry, merges)


def merge_items(pieces: int, live_rows: int, run: int, wide: bool = False) -> int:
    """Count the items of a tile: of 8 rows and 128, 64, 32, 16 or 8 columns, of runs 128 or 64.

    Wide items of 9 to 16 pieces have twice as many columns.
    """
    if run:
        return -(-live_rows // 8) * (4 if pieces <= 4 else 8)
    limits = {4: 4, 8: 8, 16: 8 if wide else 16, 32: 32}
    shares = next((n for limit, n in limits.items() if pieces <= limit), 64)
    return -(-live_rows // 8) * shares


def check_pages(
    record: list[int], seq_lens: list[int], table: torch.Tensor, page_size: int
) -> None:
    """Assert that a program's record holds the pages of the first two blocks it attends."""
    if record[13] <= 0 or not record[10]:
        return
    request, block, keys = record[11], record[2], seq_lens[record[11]]
    second = block + 1 if (block + 1) * 64 < keys else block
    expected = [int(table[request, b * 64 // page_size]) for b in (block, second)]
    assert record[14:16] == expected


def pieces_of(plan: Plan, program: int) -> list[tuple[int, int, int, int, int]]:
    """Walk a program as the kernel does: (request, tile, begin, end, slot) of each piece."""
    record = plan.programs[program]
    if record[13] <= 0:
        return []
    at, stop = tuple(record[:3]), tuple(record[3:6])
    lane, width = record[6:8]
    rows, keys, request, slot_base = record[9:13]
    found: list[tuple[int, int, int, int, int]] = []
    while at < stop:
        entry, job, block = at
        blocks, tiles = -(-keys // 64), -(-rows * plan.heads // 64)
        end = stop[2] if at[:2] == stop[:2] else blocks
        tile = lane + (job * 4 if width == 4 else tiles // (2 * width) * (2 * width))
        slot = 2 * program + bool(found)
        if plan.run:
            end = min(end, (block // plan.run + 1) * plan.run)
            slot = slot_base + tile * -(-blocks // plan.run) + block // plan.run
        direct = block == 0 and end >= blocks
        found.append((request, tile, block, end, -1 if direct else slot))
        if end < blocks:
            at = (entry, job, end)
        elif job + 1 < (tiles // 4 if width == 4 else 1):
            at = (entry, job + 1, 0)
        else:
            at = (entry + 1, 0, 0)
            rows, keys, request, slot_base = plan.entries[entry + 1][1:5]
    return found


def check(plan: Plan) -> list[int]:
    """Assert that a plan is complete and consistent; give the programs' loads."""
    walks = [pieces_of(plan, program) for program in range(len(plan.programs))]
    tiles: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for request, tile, begin, end, slot in (piece for walk in walks for piece in walk):
        tiles.setdefault((request, tile), []).append((begin, end, slot))
    assert set(tiles) == {(r, t) for r in range(len(plan.query_lens)) for t in range(plan.tiles(r))}
    slots = [slot for pieces in tiles.values() for *_, slot in pieces if slot >= 0]
    assert len(slots) == len(set(slots))
    first_rows = [0, *accumulate(plan.query_lens)]
    listed = {record[4]: record for record in plan.merges}
    cut = 0
    for (request, tile), pieces in tiles.items():
        pieces.sort()
        assert (pieces[0][0], pieces[-1][1]) == (0, plan.blocks(request))
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        if len(pieces) == 1:
            assert pieces[0][2] == -1
            continue
        cut += 1
        record = listed[first_rows[request] * plan.heads + tile * 64]
        held = [record[0], *(record[1] + i * record[2] for i in range(record[3] - 1))]
        assert held == [slot for *_, slot in pieces]
        assert record[5] == min(64, plan.query_lens[request] * plan.heads - tile * 64)
    assert cut == len(plan.merges) == len(listed)
    return [sum(end - begin + FIXED for _, _, begin, end, _ in walk) for walk in walks]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "heads"),
    [
        ([4] * 32, [8192] * 32, 16),
        ([4], [131072], 16),
        ([1 + i % 8 for i in range(32)], [8192] * 32, 16),
        ([1 + i % 4 for i in range(32)], [8192] * 32, 128),
        ([4] * 32, [65536] + [1024] * 31, 16),
    ],
)
def test_work_is_balanced(query_lens: list[int], seq_lens: list[int], heads: int) -> None:
    loads = check(make_plan(query_lens, seq_lens, heads, 132))
    # A program may start with the rest of a job, whose fixed cost the line does not hold.
    assert max(loads) <= 1.05 * sum(loads) / len(loads) + 2 * FIXED


def test_whole_tiles_are_not_cut_when_they_fit() -> None:
    plan = make_plan([4] * 128, [4096] * 128, 16, 132)
    check(plan)
    assert plan.merges == []


@pytest.mark.parametrize("seed", range(40))
def test_any_lengths_are_covered(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3, 7, 20])
    query_lens = [rng.choice([0, 1, 2, 3, 4, 8, 16]) for _ in range(count)]
    seq_lens = [rng.choice([0, 1, 63, 64, 65, 500, 8191, 70000]) for _ in range(count)]
    heads = rng.choice([1, 12, 16, 20, 40, 128])
    check(make_plan(query_lens, seq_lens, heads, rng.choice([16, 78, 132])))


@pytest.mark.parametrize("seed", range(20))
def test_batch_invariant_pieces_start_at_multiples(seed: int) -> None:
    rng = random.Random(100 + seed)
    count = rng.choice([1, 2, 3, 7, 20])
    query_lens = [rng.choice([0, 1, 2, 3, 4, 8, 16]) for _ in range(count)]
    seq_lens = [rng.choice([0, 1, 64, 65, 500, 1024, 1025, 8191, 70000]) for _ in range(count)]
    run = rng.choice([2, 16, 32])
    plan = make_plan(query_lens, seq_lens, rng.choice([12, 16, 128]), rng.choice([16, 132]), run)
    check(plan)
    pieces = [piece for p in range(len(plan.programs)) for piece in pieces_of(plan, p)]
    for request, _, begin, end, _ in pieces:
        assert begin % run == 0
        assert end == min(begin + run, plan.blocks(request))


@pytest.mark.parametrize(("count", "keys"), [(32, 1024), (32, 8192), (128, 1024)])
def test_equal_jobs_that_nearly_fit_are_not_cut(count: int, keys: int) -> None:
    query_len = 4 if count == 32 else 1
    plan = make_plan([query_len] * count, [keys] * count, 128, 132)
    check(plan)
    assert plan.merges == []


def test_many_items_of_a_merge_are_wide() -> None:
    """More than programs of the merge; `make_plan` compares all numbers and counts."""
    halved = set()
    for count, long in ((8, 2048), (24, 100_000)):
        plan = make_plan([4] * count, [long, *[2048] * (count - 1)], 16, 132)
        for _, _, _, pieces, _, live, _, items in plan.merges:
            assert items == merge_items(pieces, live, 0, wide=True)
            halved.add(items == merge_items(pieces, live, 0) // 2)
    assert halved == {True, False}
    alone = make_plan([4], [2048], 16, 132)
    _, _, _, pieces, _, live, _, items = alone.merges[0]
    assert items == merge_items(pieces, live, 0)


def test_few_forms_serve_all_batch_sizes() -> None:
    assert [lanes_for(n) for n in (1, 32, 33, 128, 129, 512, 513)] == [
        32,
        32,
        128,
        128,
        512,
        512,
        2048,
    ]
