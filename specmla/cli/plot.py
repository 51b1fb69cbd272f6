"""Draws the acceptance by position of each drafter into a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specmla.errors import ArgumentError
from specmla.verify.stats import AcceptanceStats


def plot_acceptance(stats: Mapping[str, AcceptanceStats], path: Path) -> None:
    """Draw, for each drafter, the share of drafting steps that accepted each position.

    Raises:
        ArgumentError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ArgumentError("plot needs matplotlib: pip install 'specmla[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for name, entry in stats.items():
        rates = entry.acceptance_rate_per_position
        label = f"{name}: {entry.tokens_per_step:.2f} tokens a step"
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    longest = max((len(s.acceptance_rate_per_position) for s in stats.values()), default=1)
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted, share of drafting steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
