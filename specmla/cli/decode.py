"""The `decode` command of the benchmark: it needs drafters, which only the command line knows."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmla.bench.arguments import add_common, at_least, check_outputs, dtype_of
from specmla.bench.compare_prompts import held_out_prompts
from specmla.bench.compare_run import RunSettings
from specmla.bench.decode import decode_lines, measure_decode
from specmla.bench.decode_case import DecodeOptions
from specmla.bench.environment import collect_env
from specmla.bench.progress import progress
from specmla.bench.report import write_json
from specmla.cli.checkpoint import load_tokenizer, use_one_thread
from specmla.cli.compare_drafters import contenders_of, draft_problems
from specmla.cli.named import ASSETS, SHIPPED, TREE
from specmla.errors import require
from specmla.models.weights import load_checkpoint

CAPTURED = "CUDA graphs of steps and drafts, medians of turns in alternation"
UNCAPTURED = "uncaptured (there are no graphs on a CPU), medians of turns in alternation"


def add_decode(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "decode",
        help="tokens a second of the shipped pair, plain and with drafters, as CUDA graphs",
        epilog="A turn is timed while all requests run: prompts and what a drafter makes of them "
        "are left out. The first run on a machine compiles kernels.",
    )
    parser.set_defaults(run=run_decode)
    add = parser.add_argument
    add(
        "--draft",
        default="ngram,draft_model",
        help=f"by comma: ngram, suffix, {', '.join(SHIPPED)}, directories; default "
        "ngram,draft_model",
    )
    add("--target", type=Path, metavar="DIR", help="checkpoint (default: the shipped target)")
    add("--batches", nargs="+", type=at_least(1), default=[1, 8, 32], help="default 1 8 32")
    add("--temperatures", nargs="+", type=_temperature, default=[0.0, 1.0], help="default 0 1")
    add("--drafts", type=at_least(1), default=4, help="drafts a request and step (default 4)")
    add("--max-tokens", type=at_least(8), default=96, help="new tokens a request (default 96)")
    add("--turns", type=at_least(1), default=5, help="timed turns of a case (default 5)")
    add("--impl", metavar="NAME", help="backend (default: the best that serves)")
    add(
        "--ahead",
        action=argparse.BooleanOptionalAction,
        help="also with the host one step ahead, where drafts allow it (default: with graphs)",
    )
    add("--acceptance", choices=("torch", "triton"), default="torch", help="who decides")
    add("--eager", action="store_true", help="capture nothing, on a GPU too")
    add_common(parser)


def run_decode(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure every batch size and temperature and report."""
    found = draft_problems(args.draft)
    trees = [word for word in args.draft.split(",") if word.strip().endswith(TREE)]
    found += [f"draft has {trees}, accepted are drafters of chains"] if trees else []
    require(found, "decode")
    check_outputs(args.json)
    use_one_thread(args.device)
    folder = ASSETS / "target" if args.target is None else args.target
    tokenizer: Any = load_tokenizer(folder)
    target, _ = load_checkpoint(folder, device=args.device, dtype=dtype_of(args))
    prompts = held_out_prompts(tokenizer, max(args.batches))
    captured = args.device.type == "cuda" and not args.eager
    ahead = captured if args.ahead is None else args.ahead
    options = DecodeOptions(
        args.drafts, args.max_tokens, args.turns, args.impl, captured, ahead, args.acceptance
    )
    settings = RunSettings(args.drafts, args.drafts, args.max_tokens, max(args.batches))
    longest = max(map(len, prompts)) + args.max_tokens + args.drafts + 1
    contenders = contenders_of(args.draft, target, settings, longest)
    rows: list[dict[str, Any]] = []
    with progress(len(args.batches) * len(args.temperatures) * (1 + len(contenders))) as tell:
        for batch in args.batches:
            for temperature in args.temperatures:
                rows += measure_decode(
                    target, contenders, prompts[:batch], temperature, options, tell
                )
    mode = CAPTURED if captured else UNCAPTURED if args.device.type == "cpu" else "uncaptured"
    print(decode_lines(rows))
    print(f"timed: {mode}")
    if args.json is not None:
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
        env = collect_env(_without_folders(words)) | {
            "mode": mode,
            "device": str(args.device),
            "dtype": str(dtype_of(args)).removeprefix("torch."),
            "target": "shipped" if args.target is None else folder.resolve().name,
            "prompts": {"count": len(prompts), "tokens": sum(map(len, prompts)), "digest": digest},
        }
        write_json(args.json, {"env": env, "rows": rows})
    return 0


def _without_folders(words: Sequence[str]) -> list[str]:
    """Keep of paths what they end in: where they lie says nothing about a figure."""
    return [",".join(Path(part).name for part in word.split(",")) for word in words]


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not served, accepted are values >= 0")
    return value
