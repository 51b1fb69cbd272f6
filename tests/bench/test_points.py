"""What the grid consists of, and in which order."""

from __future__ import annotations

from specmla.bench.points import FEW, SUBSETS, TARGETS, Point, is_regular, providers_of, select
from specmla.bench.verify import check_batch
from specmla.mask import DraftMask
from specmla.testing import parse_batch

EVERY = ("hopper", "flashmla", "fa3", "triton", "rows")


def test_regular_grid_is_that_of_the_targets() -> None:
    points = set(SUBSETS["rest"])
    assert len(points) == 17 * 4 * 4
    lens = [parse_batch(point.batch) for point in points]
    assert max(sum(each.seq_len for each in batch) for batch in lens) == 2**20
    shapes = {(len(batch), batch[0].seq_len // 1024) for batch in lens}
    assert (8, 128) in shapes
    assert (32, 32) in shapes
    assert (32, 128) not in shapes
    assert (128, 32) not in shapes
    assert all(map(is_regular, points))


def test_order_targets_then_coarse_then_rest_each_once() -> None:
    points = select()
    assert len(points) == len(set(points))
    assert tuple(points[: len(TARGETS)]) == TARGETS
    named = {
        p for name in ("targets", "few", "ragged", "mixed", "tree", "pages") for p in SUBSETS[name]
    }
    assert set(points[: len(named)]) == named
    coarse = set(SUBSETS["coarse"])
    assert coarse <= set(points[: len(named | coarse)])


def test_prefix_of_the_rest_has_every_value() -> None:
    first = SUBSETS["rest"][:40]
    assert {point.heads for point in first} == {16, 32, 64, 128}
    assert len({point.batch.partition("q")[0] for point in first}) == 4
    assert len({point.batch.partition("s")[2] for point in first}) == 5


def test_some_providers_are_measured_at_a_dozen_points() -> None:
    assert 12 <= len(FEW) <= 18
    assert providers_of(TARGETS[0], EVERY) == EVERY
    assert providers_of(Point("8q2s4k", 64), EVERY) == EVERY[:3]
    assert set(select(("few",))) == FEW


def test_every_point_can_be_read() -> None:
    for point in select():
        check_batch(point.batch, DraftMask(point.mask))


def test_specials_are_not_regular() -> None:
    for name in ("ragged", "mixed", "pages"):
        assert not any(map(is_regular, SUBSETS[name]))
    assert {p.page_size for p in SUBSETS["pages"]} == {16, 32}
    assert {p.mask for p in SUBSETS["tree"]} == {"tree", "causal"}
