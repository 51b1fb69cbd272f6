"""Pair a target with each drafter and print the comparison, greedy and at temperature 1.

Continuations that loop (fewer than half of their 4-grams are distinct) are dropped from the
averages: a looping model flatters every drafter.

    python examples/pair.py                      # the shipped pair on its held-out prompts
    python examples/pair.py --json pair.json --repeats 4
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from drafters import DraftModelDrafter, NgramDrafter
from specmla import AcceptanceStats, Drafter, SamplingParams
from specmla.bench.environment import collect_env
from specmla.cli.checkpoint import Pair, load_shipped_pair, parse_device, use_one_thread
from specmla.cli.run import Run, run_loop
from specmla.verify.diversity import distinct_ngram_ratio

LOOPING = 0.5
DRAFTERS = ("plain", "ngram", "draft_model")


def main() -> None:
    """Run every drafter at both temperatures and every batch size, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--repeats", type=int, default=1, help="turns of a case, medians")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = parse_device(options.device)
    use_one_thread(device)
    pair = load_shipped_pair(device)
    run_once(pair, "draft_model", 0.0, 0, len(pair.prompts), options)  # warm up
    cases = [(batch, temperature) for batch in options.batch for temperature in (0.0, 1.0)]
    rows = []
    for batch, temperature in track(cases, "cases", console=Console(stderr=True)):
        rows += measure(pair, temperature, batch, options)
    show(rows)
    if options.json:
        report = {"env": collect_env(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run_once(
    pair: Pair, name: str, temperature: float, seed: int, batch: int, options: argparse.Namespace
) -> list[Run]:
    """Continue all prompts, `batch` of them at a time."""
    prompts = [pair.tokenizer.encode(text).ids for text in pair.prompts]
    runs = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        sampling = [
            SamplingParams(
                temperature,
                seed=1000 * seed + start + i,
                max_tokens=options.max_tokens,
                stop_token_ids=pair.target.config.eos_token_ids,
            )
            for i in range(len(part))
        ]
        drafter = make_drafter(name, pair, len(part) * options.max_tokens)
        k = options.num_speculative_tokens
        runs.append(run_loop(pair.target, part, sampling, drafter, num_speculative_tokens=k))
    return runs


def measure(
    pair: Pair, temperature: float, batch: int, options: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure every drafter, several times in turns: what else the machine does hits all of them.

    A speed-up is against the plain run of the same turn. Greedy runs only differ in speed.
    """
    turns = [
        {name: run_once(pair, name, temperature, seed, batch, options) for name in DRAFTERS}
        for seed in range(options.repeats)
    ]
    rows = []
    for name in DRAFTERS:
        speeds = [speed(turn[name]) for turn in turns]
        gains = [speed(turn[name]) / speed(turn["plain"]) for turn in turns]
        counted = [run for turn in (turns if temperature else turns[:1]) for run in turn[name]]
        rows.append(
            {
                "drafter": name,
                "temperature": temperature,
                "batch": batch,
                **acceptance(counted),
                "tokens_per_s": statistics.median(speeds),
                "tokens_per_s_range": [min(speeds), max(speeds)],
                "speedup": statistics.median(gains),
                "speedup_range": [min(gains), max(gains)],
            }
        )
    return rows


def speed(runs: list[Run]) -> float:
    """Tokens per second over all prompts."""
    return sum(r.num_tokens for r in runs) / sum(r.seconds for r in runs)


def acceptance(runs: list[Run]) -> dict[str, object]:
    """What was accepted in continuations that don't loop, and how many do."""
    stats = AcceptanceStats()
    for run in runs:
        for tokens, own in zip(run.tokens, run.stats_by_prompt, strict=True):
            if distinct_ngram_ratio(tokens) >= LOOPING:
                stats.merge(own)
    ratios = [distinct_ngram_ratio(t) for run in runs for t in run.tokens]
    return {
        **stats.as_dict(),
        "distinct_4gram_ratio": sum(ratios) / len(ratios),
        "continuations": len(ratios),
        "looping": sum(r < LOOPING for r in ratios),
    }


def make_drafter(name: str, pair: Pair, num_tokens: int) -> Drafter | None:
    """Make a fresh drafter: nothing learnt from an earlier run."""
    if name == "ngram":
        return NgramDrafter(pair.target.config.vocab_size)
    if name == "draft_model":
        return DraftModelDrafter(pair.draft, num_pages=num_tokens // 64 + 8 * len(pair.prompts))
    return None


def show(rows: list[dict[str, object]]) -> None:
    """Print a table a case."""
    for batch, temperature in dict.fromkeys((row["batch"], row["temperature"]) for row in rows):
        group = [r for r in rows if (r["batch"], r["temperature"]) == (batch, temperature)]
        table = Table(f"temperature {temperature:g}, {batch} at once")
        for row in group:
            table.add_column(str(row["drafter"]), justify="right")
        for name in ("tokens_per_step", "mean_acceptance_length", "draft_acceptance_rate"):
            table.add_row(name, *(f"{row[name]:.2f}" for row in group))
        table.add_row(
            "looping, left out", *(f"{row['looping']} of {row['continuations']}" for row in group)
        )
        table.add_row("distinct 4-gram ratio", *(f"{r['distinct_4gram_ratio']:.2f}" for r in group))
        table.add_row("tokens/s", *(f"{row['tokens_per_s']:.0f}" for row in group))
        table.add_row("speedup", *(f"{row['speedup']:.2f}x" for row in group))
        Console().print(table)


if __name__ == "__main__":
    main()
