"""The figures of a finished pair, from its files, and the choice among several drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pairtrain.acceptance import run_chains
from pairtrain.monitor import Monitor
from pairtrain.network import Network
from pairtrain.options import Options

TEMPERATURES = {"greedy": 0.0, "temperature_1": 1.0}
GOALS = {"greedy": 2.6, "temperature_1": 2.0}


def evaluate(
    target_dir: Path, draft_dirs: dict[str, Path], prompts: list[list[int]], options: Options
) -> dict[str, dict[str, Any]]:
    """Measure every draft against the target, both as saved (bfloat16), computed in float32."""
    target = Network.load(target_dir, options.device, compile=False)
    rows = [torch.tensor(prompt, device=options.device) for prompt in prompts]
    figures: dict[str, dict[str, Any]] = {}
    with Monitor("evaluation") as monitor:
        for name, folder in draft_dirs.items():
            draft = Network.load(folder, options.device, compile=False)
            figures[name] = {}
            for kind, temperature in TEMPERATURES.items():
                figures[name][kind] = run_chains(
                    target.logits_at,
                    draft.logits_at,
                    rows,
                    num_drafts=options.num_speculative_tokens,
                    new_tokens=options.new_tokens,
                    temperature=temperature,
                    generator=torch.Generator(options.device).manual_seed(options.seed + 2),
                ).summary()
            figures[name]["estimated_speedup"] = _estimated_speedup(target, draft, figures[name])
            done = len(figures) / len(draft_dirs)
            speed = figures[name]["estimated_speedup"]
            monitor.update(done, f"{name}: estimated speed-up {speed}")
    return figures


def best_draft(figures: dict[str, dict[str, Any]]) -> str:
    """Name the draft of the highest estimated speed-up, of those that meet the goals if any do."""
    good = [name for name, found in figures.items() if meets_goals(found)]
    return max(good or figures, key=lambda name: float(figures[name]["estimated_speedup"]))


def meets_goals(figures: dict[str, Any]) -> bool:
    """Tell whether a draft has the tokens per step asked for."""
    return all(figures[kind]["tokens_per_step"] >= goal for kind, goal in GOALS.items())


def _estimated_speedup(target: Network, draft: Network, figures: dict[str, Any]) -> float:
    """Divide tokens a step by its cost; a forward costs its layers and one more for the head.

    So small a model is bound by the number of operations, not by their size. Mean of both
    temperatures; an estimate to choose by, no measurement.
    """
    layers = (draft.config.num_layers + 1) / (target.config.num_layers + 1)
    greedy, sampled = (figures[kind] for kind in TEMPERATURES)
    drafts = len(greedy["acceptance_by_position"])
    tokens = (greedy["tokens_per_step"] + sampled["tokens_per_step"]) / 2
    return float(round(tokens / (1 + drafts * layers), 3))
