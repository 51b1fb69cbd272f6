"""Recordings of target states for `specmla compare`: written, and scored on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specmla.bench.compare_run import Contender, RunSettings
from specmla.bench.offline import score_offline
from specmla.bench.recording import Recording, record
from specmla.cli.compare_drafters import contenders_of
from specmla.errors import ArgumentError
from specmla.generate import build_step
from specmla.models.deepseek import DeepseekForCausalLM


def write_recording(
    path: Path,
    drafts: str,
    target: DeepseekForCausalLM,
    prompts: list[list[int]],
    temperature: float,
    settings: RunSettings,
) -> None:
    """Record what the named drafters ask for; see `record`."""
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"record is {str(path)!r}, its directory does not exist")
    longest = max(map(len, prompts)) + settings.max_tokens + settings.num_nodes + 1
    layers: list[int] = []
    for contender in contenders_of(drafts, target, settings, longest):
        layers += _layers_of(contender, target)
    found = record(
        target,
        prompts,
        layers,
        max_tokens=settings.max_tokens,
        temperature=temperature,
        seed=settings.seed,
    )
    found.save(path)


def score_rows(
    path: Path, drafts: str, target: DeepseekForCausalLM, settings: RunSettings
) -> list[dict[str, Any]]:
    """Score the named drafters on a recording; a row each."""
    found = Recording.load(path)
    longest = max(map(len, found.tokens)) + settings.num_nodes + 1
    rows = []
    for contender in contenders_of(drafts, target, settings, longest):
        assert contender.make is not None
        count = settings.num_nodes if contender.tree else settings.num_drafts
        score = score_offline(found, contender.make, target, count, settings.seed)
        rows.append(
            {
                "drafter": contender.name,
                "rule": "sample_match" if found.temperature else "greedy",
                "temperature": found.temperature,
                "num_drafts": count,
                **score.as_dict(),
            }
        )
    return rows


def _layers_of(contender: Contender, target: DeepseekForCausalLM) -> list[int]:
    assert contender.make is not None
    drafter = contender.make(build_step(target, num_pages=2, num_draft_layers=1))
    return list(getattr(drafter, "hidden_layers", ()))
