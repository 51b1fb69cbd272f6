"""`specmla demo`: the shipped target, plain and with each drafter, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specmla.cli.checkpoint import Pair, load_shipped_pair, parse_device, use_one_thread
from specmla.cli.difference import FirstDifference, first_difference
from specmla.cli.lookup import LOOKUPS
from specmla.cli.named import SHIPPED, TREE, make_named
from specmla.cli.render import comparison_table, continuation
from specmla.cli.run import MakeDrafter, Run, run_loop
from specmla.errors import ArgumentError
from specmla.generate import build_step
from specmla.verify.sampling import SamplingParams

# On a GPU the verify shape may round another way than the one-token shape; above this gap between
# the two best logits a difference is no rounding tie.
MARGIN_LIMIT = 2e-2

NAMES = (*LOOKUPS, *SHIPPED, f"draft_model{TREE}", f"dflash{TREE}")


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command, in its order."""

    device: str
    num_speculative_tokens: int
    max_tokens: int
    temperature: float
    seed: int
    backend: str | None
    json: bool
    plot: Path | None
    draft: str = "ngram,draft_model,dspark"
    graphs: bool = False

    @property
    def drafts(self) -> list[str]:
        """Names of the drafters, in their order."""
        return [name.strip() for name in self.draft.split(",")]


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 if the output equals plain greedy decoding (or differs by a rounding tie)."""
    if foreign := [name for name in options.drafts if name not in NAMES]:
        raise ArgumentError(f"draft has {foreign}, accepted are {NAMES}, separated by commas")
    if options.plot is not None:
        if not options.plot.absolute().parent.is_dir():
            raise ArgumentError(f"plot is {str(options.plot)!r}, its directory does not exist")
        if options.plot.suffix.lower() != ".png" or options.plot.is_dir():
            raise ArgumentError(f"plot is {str(options.plot)!r}, accepted is a file named *.png")
    console = Console(stderr=options.json)
    device = parse_device(options.device)
    use_one_thread(device)
    pair = load_shipped_pair(device)
    prompts = [pair.tokenizer.encode(text).ids for text in pair.prompts]
    runs = _run_all(console, pair, prompts, options)
    differences = {
        name: first_difference(pair.target, prompts, runs["plain"].tokens, run.tokens)
        for name, run in runs.items()
        if name != "plain" and options.temperature == 0
    }
    _show(console, pair, prompts, runs, differences, options)
    if options.plot is not None:
        from specmla.cli.plot import plot_acceptance

        plot_acceptance({n: r.stats for n, r in runs.items() if n != "plain"}, options.plot)
        console.print(f"acceptance by position: {options.plot}", markup=False)
    if options.json:
        print(json.dumps(_summary(runs, differences, options)))
    return 0 if all(_is_tie(d, device) for d in differences.values()) else 1


def _run_all(
    console: Console, pair: Pair, prompts: list[list[int]], options: DemoOptions
) -> dict[str, Run]:
    k, device = options.num_speculative_tokens, pair.target.model.embed_tokens.weight.device
    longest = max(map(len, prompts)) + options.max_tokens + k + 1
    make: dict[str, MakeDrafter | None] = {"plain": None}
    for name in options.drafts:
        make[name] = make_named(
            name, pair.target, num_requests=len(prompts), longest=longest, backend=options.backend
        )
    _refuse_unserved(pair, make, options.backend)
    stops = pair.target.config.eos_token_ids
    sampling = [
        SamplingParams(
            options.temperature,
            seed=options.seed + i,
            max_tokens=options.max_tokens,
            stop_token_ids=stops,
        )
        for i in range(len(prompts))
    ]
    short = [SamplingParams(max_tokens=8)] * len(prompts)
    runs = {}
    console.print(f"{len(prompts)} prompts, up to {options.max_tokens} new tokens each, {device}")
    with _progress(console) as progress:
        for name, made in make.items():
            task = progress.add_task(name, total=len(prompts) * options.max_tokens)
            loop = partial(
                run_loop,
                pair.target,
                prompts,
                num_speculative_tokens=k,
                backend=options.backend,
                graphs=options.graphs,
            )
            loop(short, made)  # not timed; what a drafter learns there it must not keep
            runs[name] = loop(sampling, made, on_tokens=partial(progress.advance, task))
            progress.update(task, total=runs[name].num_tokens)  # some texts end before the limit
    return runs


def _refuse_unserved(
    pair: Pair, make: Mapping[str, MakeDrafter | None], backend: str | None
) -> None:
    """Build each drafter once, before anything is shown.

    Raises:
        UnsupportedError: a backend that doesn't serve the target or a drafter.
    """
    step = build_step(pair.target, num_pages=1, page_size=64, backend=backend, num_draft_layers=1)
    for made in make.values():
        if made is not None:
            made(step)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _show(
    console: Console,
    pair: Pair,
    prompts: list[list[int]],
    runs: dict[str, Run],
    differences: dict[str, FirstDifference | None],
    options: DemoOptions,
) -> None:
    *_, (shown, run) = runs.items()
    for text, tokens, drafted in zip(pair.prompts, run.tokens, run.drafted, strict=True):
        console.rule(style="dim")
        console.print(continuation(pair.tokenizer, text, tokens, drafted))
    console.rule(style="dim")
    console.print(f"[green]green[/]: accepted drafts of {shown}; bold: the target's own")
    console.print()
    console.print(comparison_table(runs, options.num_speculative_tokens))
    for name, difference in differences.items():
        if difference is None:
            console.print(f"{name}: identical to plain greedy decoding")
        else:
            console.print(f"{name}: differs from plain greedy decoding, first at {difference}")


def _summary(
    runs: dict[str, Run], differences: dict[str, FirstDifference | None], options: DemoOptions
) -> dict[str, object]:
    plain = runs["plain"]
    drafters = {}
    for name, run in runs.items():
        if name == "plain":
            continue
        difference = differences.get(name)
        drafters[name] = {
            **run.stats.as_dict(),
            "tokens_per_s": run.tokens_per_s,
            "speedup": run.tokens_per_s / plain.tokens_per_s,
            "first_difference": None if difference is None else asdict(difference),
        }
    greedy = options.temperature == 0
    return {
        "identical": all(d is None for d in differences.values()) if greedy else None,
        "device": options.device,
        "num_speculative_tokens": options.num_speculative_tokens,
        "plain_tokens_per_s": plain.tokens_per_s,
        "drafters": drafters,
    }


def _is_tie(difference: FirstDifference | None, device: torch.device) -> bool:
    if difference is None:
        return True
    return device.type == "cuda" and difference.top1_margin <= MARGIN_LIMIT
