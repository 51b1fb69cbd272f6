"""The README's part on the grid: the method, the targets, named points and the plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmla.bench.comparison import OURS, PEERS, Comparison
from specmla.bench.markdown import table
from specmla.bench.points import SOMEWHERE, SUBSETS, Point
from specmla.bench.report import TIMED
from specmla.bench.targets import target_table

SHOWN = ("targets", "few", "ragged", "mixed", "tree", "pages")
COLUMNS = (OURS, *PEERS, *SOMEWHERE)
PLOTS = (
    ("docs/ratio.png", "Time of the better peer over ours, by batch, context, heads and rows"),
    ("docs/roofline.png", "TFLOP/s over query rows a request, under the measured ceilings"),
)


def grid_figures(document: Mapping[str, Any]) -> list[str]:
    """Give the paragraphs, in order."""
    found = Comparison(document)
    return [
        _method(found, document),
        target_table(document),
        _table(found),
        *(f"![{text}]({path})" for path, text in PLOTS),
        "`python -m specmla.bench grid --json FILE --flashmla FILE.so --fa3 FILE.so`, then "
        "`python -m specmla.bench plot FILE --out docs`",
    ]


def _method(found: Comparison, document: Mapping[str, Any]) -> str:
    env, rows = found.env, document["rows"]
    gpu = env["gpu"]["name"] if isinstance(env["gpu"], Mapping) else env["cpu"]["name"]
    points = {point for point, _ in found.rows}
    timed = sum(row["status"] == TIMED for row in rows)
    runs = "".join(
        f" Run {i}, {sum(row.get('run') == i for row in rows)} rows: {run['note']}."
        for i, run in enumerate(env["runs"])
        if run.get("note")
    )
    several = "one run" if len(env["runs"]) == 1 else f"{len(env['runs'])} runs"
    return (
        f"**`{OURS}` against FlashMLA and FlashAttention-3**, one {gpu}, {env['date'][:10]}, torch "
        f"{env['versions']['torch']}, triton {env['versions']['triton']}; bf16, latent 512 + rope "
        "64. `32q4s8k`: 32 requests of 4 rows and 8k cached tokens (`1-8`: 1 to 8 rows in turn). "
        f"{len(points)} points, {timed} timed rows, {several}.{runs} At a point all "
        "providers are checked against float64 on a sample of its requests, then timed in turns in "
        "one process: main kernel and merge, plan apart, CUDA-graph replay, cold L2, medians. "
        "FlashMLA pads ragged "
        "batches to the longest request and knows no trees and only pages of 64; FA3 knows no "
        f"trees. Ceilings of the same run: copy {found.ceilings.copy_gbps / 1e3:.2f} TB/s, bf16 "
        f"product {found.ceilings.gemm_tflops:.0f} TFLOP/s. Ratios are the better peer's time over "
        "ours; means are over the regular grid alone."
    )


def _table(found: Comparison) -> str:
    points = dict.fromkeys(point for name in SHOWN for point in SUBSETS[name])
    lines = []
    for point in points:
        cells = [found.value(point, name) for name in COLUMNS]
        if any(cells):
            lines.append([_name(point), str(point.heads), *map(_us, cells)])
    title = f"All providers at {len(lines)} points"
    return table(["batch, µs", "heads", *COLUMNS], lines, summary=title)


def _name(point: Point) -> str:
    mask = "" if point.mask == "causal" else f" {point.mask}"
    return f"`{point.batch}`{mask}" + ("" if point.page_size == 64 else f", page {point.page_size}")


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
