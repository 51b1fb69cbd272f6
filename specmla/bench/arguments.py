"""What the benchmark's commands share of their arguments: types, defaults, refusals."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import NoReturn

import torch

from specmla.bench import plot
from specmla.bench.peers import PeerFiles
from specmla.errors import ArgumentError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Parser(argparse.ArgumentParser):
    """Reports a usage error as one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add device, dtype and the result file."""
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", type=_device, default="cuda" if gpu else "cpu", help="default: a GPU if any")
    add("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    add("--json", type=Path, metavar="FILE", help="write figures and environment")


def add_reps(parser: argparse.ArgumentParser) -> None:
    """Add the number of repetitions."""
    text = "timed repetitions (default 50)"
    parser.add_argument("--reps", type=at_least(1), default=50, help=text)


def add_dims(parser: argparse.ArgumentParser) -> None:
    """Add the widths of a cached row and the seed."""
    add = parser.add_argument
    add("--rank", type=at_least(1), default=512, help="kv_lora_rank (default 512)")
    add("--rope", type=at_least(0), default=64, help="qk_rope_head_dim (default 64)")
    add("--seed", type=at_least(0), default=0, help="of the random inputs (default 0)")


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the libraries of the optional providers."""
    add = parser.add_argument
    add("--flashmla", type=Path, metavar="FILE", help="operator library of FlashMLA (.so)")
    add("--fa3", type=Path, metavar="FILE", help="vLLM's operator library of FlashAttention-3")


def peer_files(args: argparse.Namespace) -> PeerFiles:
    """Give what `add_peers` took."""
    return PeerFiles(flashmla=args.flashmla, fa3=args.fa3)


def at_least(least: int) -> functools.partial[int]:
    """Give an argument type: integers from `least` on."""
    return functools.partial(_integer, least)


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """Give the dtype asked for, or the device's default."""
    return DTYPES[args.dtype or ("bf16" if args.device.type == "cuda" else "fp32")]


def check_outputs(json_file: Path | None, plot_file: Path | None = None) -> None:
    """Refuse what could not be written or drawn, before anything is measured.

    Raises:
        ArgumentError: all reasons.
    """
    found = []
    for path in filter(None, (json_file, plot_file)):
        if path.is_dir() or not path.resolve().parent.is_dir():
            found.append(f"{path} can't be written, accepted is a file in an existing folder")
    if plot_file is not None and plot_file.suffix not in plot.SUFFIXES:
        found.append(f"--plot is {plot_file}, accepted are names ending in {list(plot.SUFFIXES)}")
    if plot_file is not None and not plot.is_available():
        found.append(plot.HINT)
    if found:
        raise ArgumentError("; ".join(found))


def tokens(text: str) -> int:
    """Read a number of tokens, `8192` or `8k`; an argument type."""
    digits = text.removesuffix("k")
    return _integer(1, digits) * (1024 if digits != text else 1)


def _integer(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device of torch") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not served, accepted are cpu and cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{text!r} is not there, torch sees {count} GPUs")
    return device
