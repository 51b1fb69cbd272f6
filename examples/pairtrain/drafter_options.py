"""What a run of `train_drafter.py` is asked to do, checked before anything is read."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

METHODS = ("mtp", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class DrafterOptions:
    """The command line; see `read_drafter_options` for what each means."""

    methods: tuple[str, ...]
    out: Path
    target: Path
    roots: tuple[Path, ...] | None
    device: torch.device
    compile: bool
    seed: int
    workers: int
    max_megabytes: float
    held_out_percent: float
    window: int
    batch: int
    minutes: float
    steps: int | None
    rate: float
    pool: int
    drafts: int
    draft_vocab: int
    block: int
    num_layers: int
    target_layers: tuple[int, ...]
    markov_rank: int
    mask_token_id: int | None
    prompts: int
    new_tokens: int


def read_drafter_options(shipped: Path, arguments: list[str] | None = None) -> DrafterOptions:
    """Parse the command line; a bad value ends the program with code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="train_drafter.py",
        description="Train drafters on the hidden states of a target.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_run(parser, shipped)
    _add_training(parser)
    args = parser.parse_args(arguments)
    wrong = _reasons(args)
    if wrong:
        parser.error("; ".join(wrong))
    values = vars(args)
    values["roots"] = tuple(args.roots) if args.roots else None
    values["methods"] = tuple(dict.fromkeys(args.methods))
    values["target_layers"] = tuple(args.target_layers or ())
    return DrafterOptions(**values)


def _add_run(parser: argparse.ArgumentParser, shipped: Path) -> None:
    """Add what is trained, where it runs and what it reads."""
    add = parser.add_argument
    best = "cuda" if torch.cuda.is_available() else "cpu"
    add("--method", nargs="+", choices=METHODS, required=True, dest="methods", help="side by side")
    add("--out", type=Path, required=True, help="folder for checkpoints, report and plots")
    add("--target", type=Path, default=shipped, help="checkpoint with a tokenizer.json")
    add("--roots", type=Path, nargs="+", help="source folders, instead of the interpreter's")
    add("--device", type=torch.device, default=best, help="torch device")
    add("--no-compile", action="store_false", dest="compile", help="do without torch.compile")
    add("--seed", type=int, default=1, help="of weights, windows, samples and evaluation")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that read sources")
    add("--max-megabytes", type=float, default=150, help="most training text")
    add("--held-out-percent", type=float, default=4, help="of the top-level module names")
    add("--prompts", type=int, default=64, help="held-out prompts of the evaluation; 0 for none")
    add("--new-tokens", type=int, default=96, help="tokens of a continuation")


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add sizes and the training."""
    add = parser.add_argument
    add("--drafts", type=int, default=4, help="K of MTP and EAGLE-3, their depths")
    add("--draft-vocab", type=int, default=2048, help="ids that EAGLE-3 drafts, the commonest")
    add("--block", type=int, default=7, help="K of the block drafters")
    add("--num-layers", type=int, default=3, help="layers of the block drafters")
    add(
        "--target-layers", type=int, nargs="+", help="whose states make the context; spread if none"
    )
    add("--markov-rank", type=int, default=96, help="of DSpark's sequential head")
    add("--mask-token-id", type=int, help="an id that no text holds; that of byte 255 if none")
    add("--window", type=int, default=256, help="tokens of a training sequence")
    add("--batch", type=int, default=128, help="sequences of a step")
    add("--minutes", type=float, default=4, help="training time of all methods together")
    add("--steps", type=int, help="in place of the minutes")
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--pool", type=int, default=16384, help="windows sampled from the target, again and again")


def _reasons(args: argparse.Namespace) -> list[str]:
    """List what is wrong with the values, all at once."""
    positive = ["workers", "max_megabytes", "batch", "minutes", "rate", "drafts", "block"]
    positive += ["num_layers", "markov_rank", "new_tokens", "draft_vocab"]
    wrong = [
        f"--{name.replace('_', '-')}: {getattr(args, name)}; accepted is a number above 0"
        for name in positive
        if not getattr(args, name) > 0
    ]
    if args.window % 2 or args.window < 2 * max(args.block, args.drafts) + 2:
        wrong.append(f"--window: {args.window}; accepted is even and above twice the drafts")
    if "eagle3" in args.methods and args.target_layers and len(set(args.target_layers)) != 3:
        wrong.append(f"--target-layers: {args.target_layers}; accepted with eagle3 are three")
    for name in ("pool", "prompts"):
        if getattr(args, name) < 0:
            wrong.append(f"--{name}: {getattr(args, name)}; accepted is 0 or more")
    if args.steps is not None and args.steps < 1:
        wrong.append(f"--steps: {args.steps}; accepted is 1 or more")
    if not (args.target / "tokenizer.json").is_file():
        wrong.append(f"--target: {args.target} holds no tokenizer.json")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        wrong.append("--device: cuda, but this torch sees no CUDA device")
    return wrong
