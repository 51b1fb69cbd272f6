"""Drafters x rules on the same prompts: what they yield, how sure that is, and how fast they are.

All cases take turns in one process, prompt by prompt, so that what else the machine does hits all
of them; a gain in speed is against the plain run of the same turn and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specmla.bench.compare_chances import GREEDY, MULTI_ROUND
from specmla.bench.compare_rows import (
    Case,
    block_gains,
    count,
    quality,
    speed,
    tree_gains,
)
from specmla.bench.compare_run import (
    Contender,
    ContenderRun,
    RunSettings,
    parts_of,
    with_seed,
)
from specmla.bench.continuation import ComparedRun
from specmla.models.deepseek import DeepseekForCausalLM

PLAIN = Contender("plain", None)
_WARM_TOKENS = 8


def cases_of(
    contenders: Sequence[Contender], rules: Sequence[str], temperatures: Sequence[float]
) -> list[Case]:
    """List what is run.

    At temperature 0 all rules are one, and for trees token-level and block verification are.

    Args:
        contenders: drafters.
        rules: names of lossless rules of chains.
        temperatures: 0 for greedy.
    """
    found = []
    for temperature in temperatures:
        for contender in contenders:
            names = list(rules) if temperature else [GREEDY]
            if contender.tree and temperature:
                names = [MULTI_ROUND if r in ("token_level", "block") else r for r in rules]
            found += [Case(contender, name, temperature) for name in dict.fromkeys(names)]
    return found


def compare(
    target: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[Case],
    settings: RunSettings,
    repeats: int = 1,
    on_run: Callable[[str], None] = lambda label: None,
) -> dict[str, Any]:
    """Run all cases, and plain decoding at their temperatures, `repeats` times in turns.

    Acceptance figures of greedy cases are those of the first turn: the others only differ in speed.
    Looping continuations are left out of them (not of the speed), unless all loop.

    Args:
        target: the model.
        prompts: tokens of each.
        cases: from `cases_of`.
        settings: sizes and seeds; later turns have other seeds.
        repeats: turns.
        on_run: hears what is about to run.

    Returns:
        JSON values: `rows`, one a case, and `gains`: of block verification over token-level on the
        same steps, and of trees over chains of the same model.
    """
    temperatures = dict.fromkeys(case.temperature for case in cases)
    plain = {t: Case(PLAIN, "token_level" if t else GREEDY, t) for t in temperatures}
    everything = [*plain.values(), *cases]
    short = replace(settings, max_tokens=min(_WARM_TOKENS, settings.max_tokens))
    for case in everything:  # not timed; it refuses what can't be served before anything is
        _make(target, prompts[:1], case, short).run(range(1))
    seeded = [with_seed(settings, turn) for turn in range(repeats)]
    turns = [_take_turns(target, prompts, everything, own, on_run) for own in seeded]
    counted = {
        case: count([turn[case] for turn in (turns if case.temperature else turns[:1])])
        for case in cases
    }
    rows = [
        {"drafter": case.contender.name, "rule": case.rule, "temperature": case.temperature}
        | quality(case, counted[case])
        | speed([(turn[case], turn[plain[case.temperature]]) for turn in turns])
        for case in cases
    ]
    return {"rows": rows, "gains": [*block_gains(counted), *tree_gains(counted)]}


def _take_turns(
    target: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[Case],
    settings: RunSettings,
    on_run: Callable[[str], None],
) -> dict[Case, ComparedRun]:
    """Run all cases over the prompts once, one after another for each part of them."""
    runs = {case: _make(target, prompts, case, settings) for case in cases}
    for part in parts_of(len(prompts), settings.batch):
        for case, run in runs.items():
            on_run(f"{case.contender.name}, {case.rule}, temperature {case.temperature:g}")
            run.run(part)
    return {case: run.result for case, run in runs.items()}


def _make(
    target: DeepseekForCausalLM, prompts: Sequence[Sequence[int]], case: Case, settings: RunSettings
) -> ContenderRun:
    rule = "token_level" if case.rule in (GREEDY, MULTI_ROUND) else case.rule
    return ContenderRun(target, prompts, case.contender, rule, case.temperature, settings)
