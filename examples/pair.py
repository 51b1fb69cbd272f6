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
from specmla.cli.run import run_loop
from specmla.verify.diversity import distinct_ngram_ratio

LOOPING = 0.5


def main() -> None:
    """Run every drafter at both temperatures and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of each case: seeds at temperature 1, median speed",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = parse_device(options.device)
    use_one_thread(device)
    pair = load_shipped_pair(device)
    measure(
        pair, "draft_model", 0.0, argparse.Namespace(**vars(options) | {"repeats": 1})
    )  # warm up
    rows = []
    cases = [(t, name) for t in (0.0, 1.0) for name in ("plain", "ngram", "draft_model")]
    for temperature, name in track(cases, description="drafters", console=Console(stderr=True)):
        rows.append(measure(pair, name, temperature, options))
    show(rows)
    if options.json:
        report = {"env": collect_env(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(
    pair: Pair, name: str, temperature: float, options: argparse.Namespace
) -> dict[str, object]:
    """Continue all prompts with one drafter, several times; greedy runs only differ in speed."""
    prompts = [pair.tokenizer.encode(text).ids for text in pair.prompts]
    stats, runs = AcceptanceStats(), []
    for seed in range(options.repeats):
        sampling = [
            SamplingParams(temperature, seed=1000 * seed + i, max_tokens=options.max_tokens)
            for i in range(len(prompts))
        ]
        drafter = make_drafter(name, pair, len(prompts) * options.max_tokens)
        k = options.num_speculative_tokens
        runs.append(run_loop(pair.target, prompts, sampling, drafter, num_speculative_tokens=k))
    speed = statistics.median(run.tokens_per_s for run in runs)
    runs = runs if temperature else runs[:1]
    for run in runs:
        for tokens, own in zip(run.tokens, run.stats_by_prompt, strict=True):
            if distinct_ngram_ratio(tokens) >= LOOPING:
                stats.merge(own)
    ratios = [distinct_ngram_ratio(t) for run in runs for t in run.tokens]
    return {
        "drafter": name,
        "temperature": temperature,
        **stats.as_dict(),
        "tokens_per_s": speed,
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
    """Print a table a temperature; the speed-up is against plain decoding at the same one."""
    for temperature in (0.0, 1.0):
        group = [row for row in rows if row["temperature"] == temperature]
        plain = group[0]["tokens_per_s"]
        table = Table("temperature " + format(temperature, "g"))
        for row in group:
            table.add_column(str(row["drafter"]), justify="right")
        for name in ("tokens_per_step", "mean_acceptance_length", "draft_acceptance_rate"):
            table.add_row(name, *(f"{row[name]:.2f}" for row in group))
        table.add_row(
            "looping, left out", *(f"{row['looping']} of {row['continuations']}" for row in group)
        )
        table.add_row("distinct 4-gram ratio", *(f"{r['distinct_4gram_ratio']:.2f}" for r in group))
        table.add_row("tokens/s", *(f"{row['tokens_per_s']:.0f}" for row in group))
        table.add_row("speedup", *(f"{row['tokens_per_s'] / plain:.2f}x" for row in group))
        Console().print(table)


if __name__ == "__main__":
    main()
