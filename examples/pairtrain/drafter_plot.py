"""The plot of a run: losses, expected tokens a step, acceptance by place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pairtrain.curves import Curves


def draw_training(
    curves: Curves, held_out: dict[str, Any], figures: dict[str, dict[str, Any]], path: Path
) -> None:
    """Draw a PNG: both panels of the training, then acceptance by place of the draft.

    Args:
        curves: panels over tokens seen.
        held_out: by method, with `acceptance_by_position` at teacher-forced places.
        figures: by drafter, as `evaluate_drafters` gives them; may be empty.
        path: of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(curves.panels.items())
    figure = Figure(figsize=(6 * (len(panels) + 1), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (panel, series) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels) + 1, place)
        for name, points in series.items():
            tokens, values = zip(*points, strict=True)
            style = "o-" if len(points) < 30 else "-"
            axes.plot([t / 1e6 for t in tokens], values, style, label=name, markersize=3)
        axes.set(title=panel, xlabel="million tokens of the target")
        axes.grid(alpha=0.3)
        axes.legend()
    axes = figure.add_subplot(1, len(panels) + 1, len(panels) + 1)
    for name, found in held_out.items():
        rates = found["acceptance_by_position"]
        axes.plot(range(1, len(rates) + 1), rates, "o-", label=f"{name}: sum of min(p, q)")
    for name in held_out:
        for kind, style in (("greedy", "s--"), ("temperature_1", "^:")):
            if name in figures:
                rates = figures[name][kind]["acceptance_rate_per_position"]
                axes.plot(range(1, len(rates) + 1), rates, style, label=f"{name}: loop, {kind}")
    axes.set(title="acceptance by place of the draft", xlabel="draft", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
