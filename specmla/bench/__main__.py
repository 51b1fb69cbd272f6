"""The benchmark command: `python -m specmla.bench verify|step|env`.

Exit status: 0 if everything asked for was measured or refused with its reason, 1 if a provider's
result is wrong (it isn't timed), 2 for bad arguments or if nothing could be measured. Bad arguments
cost one line on stderr, before anything runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from specmla.bench import plot
from specmla.bench.environment import collect_env
from specmla.bench.progress import progress
from specmla.bench.provider import get_provider
from specmla.bench.report import TIMED, WRONG, VerifyRow, document, table, write_json
from specmla.bench.step import StepOptions, measure_step, step_lines
from specmla.bench.timing import method
from specmla.bench.verify import VerifyOptions, check_batch, run_batch
from specmla.errors import ArgumentError, SpecMLAError
from specmla.mask import DraftMask

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class _Parser(argparse.ArgumentParser):
    """Reports a usage error as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit status; usage errors raise `SystemExit(2)`.

    Args:
        argv: arguments after the command's name, those of the process if None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    try:
        status: int = args.run(args, words)
    except (SpecMLAError, OSError) as error:
        print(f"specmla.bench: error: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> _Parser:
    parser = _Parser(prog="specmla.bench", description="Measure specmla.")
    commands = parser.add_subparsers(required=True, metavar="command")
    verify = commands.add_parser(
        "verify",
        help="attention of one layer's verify, checked against float64 before it is timed",
        epilog="A batch is [count]q<rows>[-<rows>]s<tokens>, joined by commas: 32q4s8k is 32 "
        "requests of 4 new rows and 8192 cached tokens, the new rows included; 32q1-8s8k takes "
        "1 to 8 rows in turn.",
    )
    verify.set_defaults(run=_verify)
    add = verify.add_argument
    add("--batch", nargs="+", required=True, metavar="SPEC", help="batches, e.g. 32q4s8k")
    add("--heads", nargs="+", type=_at_least(1), default=[16], help="query heads (default 16)")
    add("--impl", nargs="+", required=True, metavar="NAME", help="providers; ratios to the first")
    add("--page-size", type=_at_least(1), default=64, help="tokens a page (default 64)")
    add("--mask", choices=[m.value for m in DraftMask], default="causal")
    add("--rank", type=_at_least(1), default=512, help="kv_lora_rank (default 512)")
    add("--rope", type=_at_least(0), default=64, help="qk_rope_head_dim (default 64)")
    add("--seed", type=_at_least(0), default=0, help="of the random inputs (default 0)")
    add("--plot", type=Path, metavar="FILE", help="draw a bar chart (.png, .svg, .pdf)")
    _add_common(verify)
    step = commands.add_parser("step", help="host time of VerifyStep.plan and commit")
    step.set_defaults(run=_step)
    add = step.add_argument
    add("--requests", type=_at_least(1), default=32, help="batch size (default 32)")
    add("--drafts", type=_at_least(0), default=4, help="drafts a request (default 4)")
    add("--prompt-len", type=_at_least(1), default=8192, help="cached tokens (default 8192)")
    add("--page-size", type=_at_least(1), default=64, help="tokens a page (default 64)")
    add("--impl", metavar="NAME", help="backend that plans (default: the best that serves)")
    _add_common(step)
    env = commands.add_parser("env", help="print versions, device and commit as JSON")
    env.set_defaults(run=lambda args, words: print(json.dumps(collect_env(words), indent=1)) or 0)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", type=_device, default="cuda" if gpu else "cpu", help="default: a GPU if any")
    add("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    add("--reps", type=_at_least(1), default=50, help="timed repetitions (default 50)")
    add("--json", type=Path, metavar="FILE", help="write figures and environment")


def _at_least(least: int) -> functools.partial[int]:
    return functools.partial(_integer, least)


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


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return DTYPES[args.dtype or ("bf16" if args.device.type == "cuda" else "fp32")]


def _check_outputs(json_file: Path | None, plot_file: Path | None = None) -> None:
    """Refuse what could not be written or drawn, before anything is measured."""
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


def _verify(args: argparse.Namespace, words: Sequence[str]) -> int:
    mask = DraftMask(args.mask)
    for batch in args.batch:
        check_batch(batch, mask)
    makers = [functools.partial(get_provider, name) for name in args.impl]
    for make in makers:
        make()  # an unknown name is refused before anything is measured
    _check_outputs(args.json, args.plot)
    options = VerifyOptions(
        page_size=args.page_size,
        mask=mask,
        dtype=_dtype(args),
        kv_lora_rank=args.rank,
        rope_dim=args.rope,
        device=args.device,
        reps=args.reps,
        seed=args.seed,
    )
    rows: list[VerifyRow] = []
    with progress(len(args.batch) * len(args.heads) * len(makers)) as tell:
        for batch in args.batch:
            for heads in args.heads:
                tell(f"{batch}, {heads} heads")
                for row in run_batch(batch, heads, makers, options):
                    rows.append(row)
                    tell(f"{batch}, {heads} heads, {row.provider} done")
    return _report(args, words, rows)


def _report(args: argparse.Namespace, words: Sequence[str], rows: Sequence[VerifyRow]) -> int:
    env = collect_env(words) | {"mode": method(args.device)}
    print(table(rows))
    print(f"timed: {env['mode']}")
    if args.json is not None:
        write_json(args.json, document(env, rows))
    if args.plot is not None:
        gpu = env["gpu"]
        name = gpu["name"] if isinstance(gpu, dict) else env["cpu"]["name"]
        plot.plot_rows(rows, f"{name} · {args.mask} · {rows[0].dtype}", args.plot)
    if any(row.status == WRONG for row in rows):
        return 1
    return 0 if any(row.status == TIMED for row in rows) else 2


def _step(args: argparse.Namespace, words: Sequence[str]) -> int:
    _check_outputs(args.json)
    options = StepOptions(
        num_requests=args.requests,
        num_drafts=args.drafts,
        prompt_len=args.prompt_len,
        page_size=args.page_size,
        backend=args.impl,
        device=args.device,
        dtype=_dtype(args),
        reps=args.reps,
    )
    figures = measure_step(options)
    print(step_lines(figures))
    if args.json is not None:
        write_json(args.json, {"env": collect_env(words), "rows": [figures]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
