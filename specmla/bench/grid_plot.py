"""Draws a grid's file: a roofline, and a heat map of the better peer's time over ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specmla.bench.comparison import LATENCY_US, Comparison, Duel, most_rows
from specmla.bench.points import BATCHES, CONTEXTS, HEADS, MAX_TOKENS, QUERY_LENS, Point

COLORS = {
    "hopper": "#d1495b",
    "flashmla": "#2e6f95",
    "fa3": "#7aa95c",
    "triton": "#8f6bb0",
    "rows": "#9a9a9a",
}
FLOPS_PER_BYTE_AND_ROW = 2 * (576 + 512) / (576 * 2)
"""A cached bf16 row is read once and met by every query row of its request."""
TOP_RATIO = 2.0
"""Where the heat map's colours end."""


def draw_all(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write roofline.png and ratio.png into a folder; gives their paths."""
    found = Comparison(document)
    paths = [folder / "roofline.png", folder / "ratio.png"]
    draw_roofline(found, paths[0])
    draw_ratio(found, paths[1])
    return paths


def draw_roofline(found: Comparison, path: Path) -> None:
    """Draw TFLOP/s over query rows a request, one point a timed row, under both ceilings."""
    figure, axes = _canvas(9.0, 6.0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    names = [name for name in COLORS if any(provider == name for _, provider in found.rows)]
    for i, name in enumerate(names):
        points = [p for p, provider in found.rows if provider == name and found.value(p, name)]
        # Side by side, not on top of each other.
        shift = 2 ** (0.14 * (i - (len(names) - 1) / 2))
        for is_short in (False, True):
            chosen = [p for p in points if (found.floor_us(p) < LATENCY_US) is is_short]
            axes.scatter(
                [most_rows(p) * shift for p in chosen],
                [found.value(p, name, "tflops") for p in chosen],
                s=20,
                facecolors="none" if is_short else COLORS[name],
                edgecolors=COLORS[name],
                linewidths=0.9,
                alpha=0.85,
                label=None if is_short else name,
                zorder=3,
            )
    _draw_ceilings(axes, found)
    ticks = [16, 32, 64, 128, 256, 512, 1024]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(12, 1500)
    axes.set_xlabel("query rows a request (most rows of a ragged batch) x heads")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_title(
        _title(found, f"hollow: floor below {LATENCY_US:.0f} µs; side by side: the same rows"),
        fontsize=10,
    )
    if names:
        axes.legend(loc="lower right", fontsize=9, framealpha=1.0)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def draw_ratio(found: Comparison, path: Path) -> None:
    """Draw the regular grid: batch and context down, heads and rows a request across."""
    duels = {duel.point: duel for duel in found.duels()}
    lines = [(b, s) for b in BATCHES for s in CONTEXTS if b * s * 1024 <= MAX_TOKENS]
    columns = [(h, q) for h in HEADS for q in QUERY_LENS]
    figure, axes = _canvas(11.0, 8.2)
    cells = [[duels.get(Point(f"{b}q{q}s{s}k", h)) for h, q in columns] for b, s in lines]
    shades = [[math.nan if d is None else math.log2(d.ratio) for d in line] for line in cells]
    top = math.log2(TOP_RATIO)
    image = axes.imshow(shades, cmap="RdBu", vmin=-top, vmax=top, aspect="auto")
    axes.set_facecolor("#f2f2f2")
    for y, line in enumerate(cells):
        for x, duel in enumerate(line):
            _write_cell(axes, x, y, duel)
    axes.set_xticks(range(len(columns)), [str(q) for _, q in columns], fontsize=9)
    axes.set_yticks(range(len(lines)), [f"{b} x {s}k" for b, s in lines], fontsize=9)
    for i, heads in enumerate(HEADS):
        middle = (i + 0.5) * len(QUERY_LENS) - 0.5
        axes.text(middle, -0.75, f"{heads} heads", ha="center", va="bottom", fontsize=10)
        if i:
            axes.axvline(i * len(QUERY_LENS) - 0.5, color="black", linewidth=1.2)
    for y in range(1, len(lines)):
        if lines[y][0] != lines[y - 1][0]:
            axes.axhline(y - 0.5, color="black", linewidth=1.2)
    axes.set_xlabel("q (query rows a request before heads)")
    axes.set_ylabel("batch x context")
    axes.tick_params(length=0)
    text = "better peer's time / hopper's (blue: hopper is faster); F: FlashMLA, A: FA3 is the peer"
    axes.set_title(_title(found, text), fontsize=10, pad=26)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, extend="both")
    ticks = [0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0]
    bar.set_ticks([math.log2(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    return figure, axes


def _draw_ceilings(axes: Any, found: Comparison) -> None:
    rate, peak = found.ceilings
    slope = rate * FLOPS_PER_BYTE_AND_ROW / 1e3
    ridge = peak / slope
    rows: Sequence[float] = [10, ridge, 2000]
    axes.plot(rows, [min(peak, slope * row) for row in rows], color="black", linewidth=1.3)
    axes.set_ylim(top=peak * 2)
    labels = (
        (420, peak, f"bf16 product, {peak:.0f} TFLOP/s", "center"),
        (12.5, slope * 36, f"copy, {rate / 1e3:.2f} TB/s,\neach cached row read once", "left"),
    )
    for x, y, text, side in labels:
        axes.annotate(
            text, (x, y), (0, 6), textcoords="offset points", ha=side, va="bottom", fontsize=9
        )


def _write_cell(axes: Any, x: int, y: int, duel: Duel | None) -> None:
    if duel is None:
        axes.text(x, y, "-", ha="center", va="center", fontsize=8, color="#999999")
        return
    strong = abs(math.log2(duel.ratio)) > 0.62 * math.log2(TOP_RATIO)
    mark = "F" if duel.peer == "flashmla" else "A"
    text = f"{duel.ratio:.2f}{mark}"
    color = "white" if strong else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=color)


def _title(found: Comparison, text: str) -> str:
    gpu, versions = found.env.get("gpu"), found.env.get("versions", {})
    name = gpu["name"] if isinstance(gpu, Mapping) else "CPU"
    date = str(found.env.get("date", ""))[:10]
    return f"{name}, {date}, torch {versions.get('torch')}, triton {versions.get('triton')}\n{text}"
