"""What a run is asked to do, checked before anything is read or allocated."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pairtrain.size import ModelSize


@dataclass(frozen=True)
class Options:
    """The command line; see `read_options` for what each means."""

    out: Path
    target_dir: Path | None
    roots: tuple[Path, ...] | None
    device: torch.device
    compile: bool
    seed: int
    workers: int
    max_megabytes: float
    held_out_percent: float
    vocab_size: int
    target_size: ModelSize
    draft_sizes: tuple[ModelSize, ...]
    window: int
    batch: int
    target_minutes: float
    draft_minutes: float
    steps: int | None
    target_rate: float
    draft_rate: float
    pool: int
    num_speculative_tokens: int
    prompts: int
    new_tokens: int


def read_options(arguments: list[str] | None = None) -> Options:
    """Parse the command line; a bad value ends the program with code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="train_pair.py",
        description="Train an MLA target on this interpreter's Python sources, and drafts from it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_run(parser)
    _add_models(parser)
    _add_training(parser)
    args = parser.parse_args(arguments)
    wrong = _reasons(args)
    if wrong:
        parser.error("; ".join(wrong))
    values = vars(args)
    values["roots"] = tuple(args.roots) if args.roots else None
    values["draft_sizes"] = tuple(_parsed(size) for size in args.draft_sizes)
    return Options(**values)


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add where it runs and what it reads."""
    add = parser.add_argument
    best = "cuda" if torch.cuda.is_available() else "cpu"
    add("--out", type=Path, required=True, help="folder for the models, report and plot")
    add("--target", type=Path, dest="target_dir", help="trained target: train the drafts only")
    add("--roots", type=Path, nargs="+", help="source folders, instead of the interpreter's")
    add(
        "--device",
        type=_device,
        default=best,
        help="torch device",
    )
    add("--no-compile", action="store_false", dest="compile", help="do without torch.compile")
    add("--seed", type=int, default=1, help="of weights, windows, samples and evaluation")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that read sources")
    add("--max-megabytes", type=float, default=400, help="most training text")
    add("--held-out-percent", type=float, default=4, help="of the top-level module names")


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the models."""
    add = parser.add_argument
    add("--vocab-size", type=int, default=4096, help="of the byte-level BPE")
    add(
        "--target-size",
        type=ModelSize.parse,
        default="11x160",
        help="layers x hidden of the target",
    )
    add(
        "--draft-sizes",
        type=ModelSize.parse,
        nargs="+",
        default=["2x128", "2x160", "1x160"],
        help="drafts to train side by side; the best one is named `draft`",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the training and the evaluation."""
    add = parser.add_argument
    add("--window", type=int, default=512, help="tokens of a training sequence")
    add("--batch", type=int, default=256, help="sequences of a step")
    add("--target-minutes", type=float, default=4, help="training time of the target")
    add("--draft-minutes", type=float, default=2, help="training time of the drafts together")
    add("--steps", type=int, help="steps of each, in place of the minutes")
    add("--target-rate", type=float, default=3e-3, help="peak learning rate of the target")
    add("--draft-rate", type=float, default=4e-3, help="peak learning rate of the drafts")
    add("--pool", type=int, default=12288, help="windows sampled from the target, thrice")
    add("--num-speculative-tokens", type=int, default=4, help="K of the evaluation")
    add("--prompts", type=int, default=256, help="held-out prompts of the evaluation")
    add("--new-tokens", type=int, default=96, help="tokens of a continuation")


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"{text!r} is no torch device") from error


def _parsed(size: str | ModelSize) -> ModelSize:
    return ModelSize.parse(size) if isinstance(size, str) else size


def _reasons(args: argparse.Namespace) -> list[str]:
    """List what is wrong with the values, all at once."""
    wrong = [
        f"--{name.replace('_', '-')}: {getattr(args, name)}; accepted is a number above 0"
        for name in [
            "workers",
            "max_megabytes",
            "window",
            "batch",
            "target_minutes",
            "draft_minutes",
            "target_rate",
            "draft_rate",
            "pool",
            "num_speculative_tokens",
            "prompts",
            "new_tokens",
        ]
        if not getattr(args, name) > 0
    ]
    if args.steps is not None and args.steps < 1:
        wrong.append(f"--steps: {args.steps}; accepted is 1 or more")
    if not 0 < args.held_out_percent < 100:
        wrong.append(f"--held-out-percent: {args.held_out_percent}; accepted is between 0 and 100")
    if not 257 <= args.vocab_size <= 32767:
        wrong.append(f"--vocab-size: {args.vocab_size}; accepted is 257 to 32767 (int16 ids)")
    if args.window < 16:
        wrong.append(f"--window: {args.window}; accepted is 16 or more")
    if args.target_dir and not (args.target_dir / "tokenizer.json").is_file():
        wrong.append(f"--target: {args.target_dir} holds no tokenizer.json")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        wrong.append("--device: cuda, but this torch sees no CUDA device")
    return wrong
