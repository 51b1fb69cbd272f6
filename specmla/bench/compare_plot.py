"""Draws a comparison: tokens a step with intervals, speed beside plain decoding, and the overlap of
p and q by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specmla.bench.plot import HINT, is_available
from specmla.errors import ArgumentError

_INCHES_PER_BAR = 0.27
_COLOURS = {
    "greedy": "tab:gray",
    "token_level": "tab:blue",
    "block": "tab:orange",
    "multi_round": "tab:green",
    "sample_match": "tab:purple",
}


def plot_comparison(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of the rows of `compare`.

    Raises:
        ArgumentError: matplotlib is missing.
    """
    if not is_available():
        raise ArgumentError(HINT)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    groups = [[row for row in rows if row["temperature"] == t] for t in temperatures]
    height = 1.6 + _INCHES_PER_BAR * max(map(len, groups))
    count = len(groups) + 1
    figure = Figure(figsize=(4.9 * count, max(3.6, height)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count)
    longest = max(row["expected_tokens_per_step_interval"][1] for row in rows)
    for one, temperature, group in zip(axes, temperatures, groups, strict=False):
        _bars(one, temperature, group, longest)
        one.set_ylim(max(map(len, groups)) - 0.5, -0.5)
    _lines(axes[-1], groups[-1])
    figure.savefig(path, dpi=150)


def _bars(axes: Any, temperature: float, rows: Sequence[Mapping[str, Any]], longest: float) -> None:
    for place, row in enumerate(rows):
        mean, (low, high) = (
            row["expected_tokens_per_step"],
            row["expected_tokens_per_step_interval"],
        )
        colour = _COLOURS.get(row["rule"], "tab:red")
        axes.barh(place, mean, color=colour, alpha=0.75)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        text = f"{mean:.2f}   {row['tokens_per_s']:.0f}/s, {row['speedup']:.2f}x"
        axes.text(high + 0.02 * longest, place, text, va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{r['drafter']}\n{r['rule']}" for r in rows], fontsize=7)
    axes.set_xlim(0, 1.5 * longest)
    axes.set_xlabel("expected tokens a step, 95 % interval over prompts\n(dotted: plain decoding)")
    plain = rows[0]["plain_tokens_per_s"]
    title = f"temperature {temperature:g}\ntokens a step; tokens/s, times plain ({plain:.0f}/s)"
    axes.set_title(title, fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")


def _lines(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the overlap of the first rule of each chain drafter: it says the same of all rules."""
    shown: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row.get("overlap_per_position"):
            shown.setdefault(row["drafter"], row)
    for name, row in shown.items():
        means = row["overlap_per_position"]
        ends = row["overlap_per_position_interval"]
        places = range(1, len(means) + 1)
        (line,) = axes.plot(places, means, marker="o", label=name)
        low, high = zip(*ends, strict=True)
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15)
    longest = max((len(row["overlap_per_position"]) for row in shown.values()), default=1)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, 1 + longest))
    axes.set_xlabel("draft position")
    axes.set_ylabel("sum of min(p, q), if those before stand")
    axes.set_title(
        f"temperature {rows[0]['temperature']:g}, chains\nbands: 95 % over prompts", fontsize=9
    )
    axes.grid(alpha=0.3)
    if shown:
        axes.legend(fontsize=8)
