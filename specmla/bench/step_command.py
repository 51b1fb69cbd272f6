"""The `step` command: host time of the bookkeeping, or whole steps of a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmla.bench.arguments import (
    add_common,
    add_reps,
    at_least,
    check_outputs,
    dtype_of,
    tokens,
)
from specmla.bench.environment import collect_env
from specmla.bench.progress import progress
from specmla.bench.report import write_json
from specmla.bench.step import StepOptions, measure_step, step_lines
from specmla.bench.step_config import MLP, read_config
from specmla.bench.step_model import (
    ModelStepOptions,
    break_even,
    make_model,
    measure_batch,
    model_step_lines,
)

METHOD = "wall time of plan, replay (or eager model) and commit, the device awaited; median"


def add_step(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "step",
        help="host time of plan and commit; with --config, whole steps and the break-even K",
        epilog="With --config the layers of a model run, with random weights, over --context "
        "cached tokens, for each of --batches and each number of drafts up to that of "
        "--acceptance: the chance of each draft if all before it stand.",
    )
    parser.set_defaults(run=_step)
    add = parser.add_argument
    add("--requests", type=at_least(1), default=32, help="batch size (default 32)")
    add("--drafts", type=at_least(0), default=4, help="drafts a request (default 4)")
    add("--prompt-len", type=at_least(1), default=8192, help="cached tokens (default 8192)")
    add("--page-size", type=at_least(1), default=64, help="tokens a page (default 64)")
    add("--impl", metavar="NAME", help="backend (default: the best that serves)")
    add("--config", type=Path, metavar="FILE", help="a model's config.json")
    add("--layers", type=at_least(1), default=4, help="layers to run (default 4)")
    add("--tp", type=at_least(1), default=1, help="ranks that share heads and MLPs (default 1)")
    add("--experts", choices=MLP, default="dense", help="one MLP for them (default), or routed")
    add("--acceptance", type=_rates, default="0.8,0.7,0.6,0.5", help="default 0.8,0.7,0.6,0.5")
    add("--batches", nargs="+", type=at_least(1), default=[1, 8, 32, 128], help="batch sizes")
    add("--context", type=tokens, default=4096, help="cached tokens of a request (default 4k)")
    add("--draft-us", type=_microseconds, default=0.0, help="cost of a draft (default 0)")
    add_reps(parser)
    add_common(parser)


def _step(args: argparse.Namespace, words: Sequence[str]) -> int:
    if args.config is not None:
        return _model_step(args, words)
    check_outputs(args.json)
    options = StepOptions(
        num_requests=args.requests,
        num_drafts=args.drafts,
        prompt_len=args.prompt_len,
        page_size=args.page_size,
        backend=args.impl,
        device=args.device,
        dtype=dtype_of(args),
        reps=args.reps,
    )
    figures = measure_step(options)
    print(step_lines(figures))
    if args.json is not None:
        write_json(args.json, {"env": collect_env(words), "rows": [figures]})
    return 0


def _model_step(args: argparse.Namespace, words: Sequence[str]) -> int:
    config = read_config(args.config, args.layers, args.tp, args.experts)
    check_outputs(args.json)
    options = ModelStepOptions(
        config=config,
        acceptance=args.acceptance,
        context=args.context,
        page_size=args.page_size,
        backend=args.impl,
        device=args.device,
        dtype=dtype_of(args),
        reps=args.reps,
        draft_us=args.draft_us,
    )
    model = make_model(options)
    rows: list[dict[str, Any]] = []
    summaries: list[dict[str, Any]] = []
    with progress(len(args.batches)) as tell:
        for batch in args.batches:
            tell(f"{batch} requests")
            measured = measure_batch(model, batch, options)
            rows += measured
            summaries.append({"requests": batch} | break_even(measured))
    print(model_step_lines(rows, summaries))
    if args.json is not None:
        env = collect_env(words) | {
            "mode": METHOD,
            "mlp": MLP[args.experts],
            "config": config.to_hf(),
        }
        write_json(args.json, {"env": env, "rows": rows, "summaries": summaries})
    return 0


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from error
    if not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} accepts numbers from 0 to 1")
    return rates


def _microseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} accepts numbers from 0 on")
    return value
