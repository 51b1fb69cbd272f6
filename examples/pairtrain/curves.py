"""Loss curves: collected while training, drawn at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Curves:
    """Named series of (tokens seen, value), grouped into the panels of one figure."""

    panels: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)

    def add(self, panel: str, series: str, tokens: int, value: float) -> None:
        """Append a point."""
        self.panels.setdefault(panel, {}).setdefault(series, []).append((tokens, value))

    def last(self, panel: str, series: str) -> float:
        """Give the newest value of a series."""
        return self.panels[panel][series][-1][1]

    def draw(self, path: Path) -> None:
        """Draw every panel beside the others into a PNG at `path`."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6 * max(len(self.panels), 1), 4), layout="constrained")
        FigureCanvasAgg(figure)
        for place, (panel, series) in enumerate(self.panels.items(), start=1):
            axes = figure.add_subplot(1, len(self.panels), place)
            for name, points in series.items():
                tokens, values = zip(*points, strict=True)
                style = "o-" if len(points) < 30 else "-"
                axes.plot([t / 1e6 for t in tokens], values, style, label=name, markersize=3)
            axes.set(title=panel, xlabel="million tokens", ylabel="nats per token")
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path, dpi=120)
