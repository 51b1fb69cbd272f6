"""Draws a verify benchmark: time by batch, one bar a provider, labelled with the rates."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from specmla.bench.report import VerifyRow

HINT = "plots need matplotlib: pip install 'specmla[bench]'"
BAR = 0.8
SUFFIXES = (".png", ".svg", ".pdf")
INCHES_PER_BAR = 0.32


def is_available() -> bool:
    """Whether matplotlib is installed; it is imported only to draw."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_rows(rows: Sequence[VerifyRow], title: str, path: Path) -> None:
    """Write a bar chart of all rows that have a figure; the suffix of `path` is the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.us is not None]
    cases = list(dict.fromkeys((row.batch, row.heads) for row in timed))
    providers = list(dict.fromkeys(row.provider for row in timed))
    height = BAR / max(len(providers), 1)
    figure = Figure(figsize=(8, 1.4 + INCHES_PER_BAR * len(cases) * (len(providers) + 1)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, provider in enumerate(providers):
        own = [row for row in timed if row.provider == provider]
        at = [cases.index((row.batch, row.heads)) + (i + 0.5) * height - BAR / 2 for row in own]
        bars = axes.barh(at, [row.us or 0.0 for row in own], height, label=provider)
        labels = [f" {row.us:.1f} µs, {row.gbps:.0f} GB/s, {row.tflops:.0f} TF/s" for row in own]
        axes.bar_label(bars, labels, fontsize=8)
    axes.set_yticks(range(len(cases)), [f"{batch}\n{heads} heads" for batch, heads in cases])
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set_xlabel("µs per layer")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")
