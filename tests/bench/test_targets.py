"""Judging a grid's file: classes, means and named points, on figures made up here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from specmla.bench.comparison import Comparison, PointClass, geometric_mean
from specmla.bench.grid_figures import grid_figures
from specmla.bench.grid_plot import draw_all
from specmla.bench.points import TARGETS, Point
from specmla.bench.targets import judge, target_table

CEILINGS = {"copy_gbps": 4000.0, "gemm_tflops": 700.0}
SHORT = Point("1q1s1k", 16)
WIDE = Point("32q4s8k", 16)
DEEP, DEEPER = Point("32q2s8k", 128), Point("32q4s8k", 128)


def row(point: Point, provider: str, us: float | None, **fields: Any) -> dict[str, Any]:
    found = {
        "batch": point.batch,
        "heads": point.heads,
        "mask": point.mask,
        "page_size": point.page_size,
        "provider": provider,
        "status": "refused" if us is None else "timed",
    }
    return found | ({} if us is None else {"us": us, "rel_err": 1e-3}) | fields


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    env = {
        "date": "2026-01-02T03:04:05",
        "gpu": {"name": "some GPU"},
        "versions": {"torch": "1", "triton": "2"},
        "runs": [{}],
        "ceilings": CEILINGS,
    }
    return {"env": env, "rows": list(rows)}


def duel_rows(point: Point, ours: float, flashmla: float, fa3: float) -> list[dict[str, Any]]:
    times = {"hopper": ours, "flashmla": flashmla, "fa3": fa3}
    return [row(point, name, us) for name, us in times.items()]


def line(found: dict[str, Any], part: str) -> list[str]:
    (cells,) = [judged.cells() for judged in judge(found) if part in judged.cells()[0]]
    return cells


@pytest.mark.parametrize(
    ("point", "kind"),
    [
        (SHORT, PointClass.LATENCY),
        (Point("1q4s8k", 128), PointClass.LATENCY),
        (Point("1q8s8k", 128), PointClass.COMPUTE),
        (WIDE, PointClass.MEMORY),
        (Point("32q8s8k", 16), PointClass.COMPUTE),
        (DEEP, PointClass.COMPUTE),
    ],
)
def test_classes(point: Point, kind: PointClass) -> None:
    duel = Comparison(document(*duel_rows(point, 1, 2, 3))).duel(point)
    assert duel is not None
    assert duel.kind is kind


def test_floor_is_the_larger_of_bytes_and_operations() -> None:
    found = Comparison(document())
    assert found.floor_us(WIDE) == pytest.approx(32 * 8192 * 1152 / 4000e9 * 1e6)
    flops = 2 * 32 * 8192 * 256 * 1088
    assert found.floor_us(DEEP) == pytest.approx(flops / 700e12 * 1e6)


def test_duel_is_against_the_faster_peer_and_needs_both_sides() -> None:
    rows = duel_rows(WIDE, 80, 100, 90)
    duel = Comparison(document(*rows)).duel(WIDE)
    assert duel is not None
    assert (duel.peer, duel.ratio) == ("fa3", 90 / 80)
    assert Comparison(document(rows[0])).duel(WIDE) is None
    assert Comparison(document(*rows[1:])).duel(WIDE) is None
    one = Comparison(document(rows[0], rows[1], row(WIDE, "fa3", None))).duel(WIDE)
    assert one is not None
    assert one.peer == "flashmla"


def test_means_and_the_lowest_are_over_the_regular_grid_only() -> None:
    ragged = Point("32q1-4s8k", 128)
    found = document(
        *duel_rows(DEEP, 100, 120, 130),
        *duel_rows(DEEPER, 100, 80, 130),
        *duel_rows(ragged, 100, 900, 900),
        *duel_rows(Point("32q4s8k", 128, page_size=32), 100, 900, 900),
    )
    mean = line(found, "compute-bound, geometric mean of 2 points")
    assert mean[3] == f"{math.sqrt(1.2 * 0.8):.2f}"
    assert mean[-1] == "required"
    lowest = line(found, "compute-bound, lowest ratio (32q4s8k, 128 heads)")
    assert (lowest[3], lowest[-1]) == ("0.80", "no")
    assert line(found, "memory-bound")[-1] == "-"


def test_named_points_in_their_units() -> None:
    bandwidth = Point("128q4s4k", 16)
    found = document(
        *duel_rows(WIDE, 82.0, 98.0, 106.0),
        row(bandwidth, "hopper", 1.0, gbps=4010.0),
        row(bandwidth, "flashmla", 1.0, gbps=3610.0),
        row(DEEP, "hopper", 1.0, tflops=600.0),
    )
    assert line(found, "32 x 8k, 16 heads, q 4")[1:] == [
        "≤ 84.0 µs", "80.0 µs", "82.0 µs", "98.0 µs (flashmla)", "1.20", "required",
    ]  # fmt: skip
    assert line(found, "128 x 4k")[3:] == ["4.01 TB/s", "3.61 TB/s (flashmla)", "1.11", "aim"]
    assert line(found, "32 x 8k, 128 heads, q 2")[3:] == ["600 TFLOP/s", "-", "-", "no"]
    assert line(found, "1 x 4k")[3:] == ["not measured", "-", "-", "-"]


def test_tree_error_and_host_lines() -> None:
    found = document(
        row(Point("32q16s8k", 16), "hopper", 200.0, host_us=30.0),
        row(Point("32q16s8k", 16, "tree"), "hopper", 212.0, host_us=50.0),
        row(WIDE, "hopper", 80.0, rel_err=0.9e-3, host_us=34.0),
        row(WIDE, "flashmla", 90.0),
        row(WIDE, "triton", 90.0, host_us=9.0),
    )
    assert line(found, "tree of 16")[3:] == ["1.06", "-", "-", "no"]
    assert line(found, "relative error")[3] == "0.900"
    assert line(found, "host time")[3] == "34.0 µs"


def test_empty_grid_is_not_measured_everywhere() -> None:
    assert all(judged.cells()[3] == "not measured" for judged in judge(document()))
    assert target_table(document()).count("\n") == 15


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_readme_part_shows_targets_points_and_plots() -> None:
    tree = Point("32q16s8k", 16, "tree")
    text = "\n\n".join(
        grid_figures(document(*duel_rows(WIDE, 82, 98, 106), row(tree, "hopper", 9)))
    )
    assert "some GPU, 2026-01-02" in text
    assert "| `32q4s8k` | 16 | 82.0 | 98.0 | 106.0 | - | - |" in text
    assert "| `32q16s8k` tree | 16 | 9.0 | - | - | - | - |" in text
    assert "docs/ratio.png" in text
    assert "docs/roofline.png" in text


def test_plots_are_written(tmp_path: Path) -> None:
    rows = [r for i, p in enumerate(TARGETS) for r in duel_rows(p, 50 + i, 60, 70)]
    for each in rows:
        each["tflops"] = 100.0
    for paths in (draw_all(document(*rows), tmp_path), draw_all(document(), tmp_path)):
        assert [path.name for path in paths] == ["roofline.png", "ratio.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
