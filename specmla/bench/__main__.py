"""The benchmark: `python -m specmla.bench COMMAND`.

Commands are verify, grid, plot, layer, prefill, step, accept, trees, decode and env.

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

from specmla.bench import plot
from specmla.bench.accept_command import add_accept
from specmla.bench.arguments import (
    Parser,
    add_common,
    add_dims,
    add_peers,
    add_reps,
    at_least,
    check_outputs,
    dtype_of,
    peer_files,
)
from specmla.bench.environment import collect_env
from specmla.bench.grid_command import add_grid, add_plot
from specmla.bench.layer_command import add_layer
from specmla.bench.prefill_command import add_prefill
from specmla.bench.progress import progress
from specmla.bench.provider import get_provider
from specmla.bench.report import TIMED, WRONG, VerifyRow, document, table, write_json
from specmla.bench.step_command import add_step
from specmla.bench.timing import method
from specmla.bench.trees_command import add_trees
from specmla.bench.verify import VerifyOptions, check_batch, run_batch
from specmla.cache import cache_format
from specmla.cache.formats.names import QUANTISED_NAMES
from specmla.cli.decode import add_decode
from specmla.errors import SpecMLAError
from specmla.mask import DraftMask


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


def _parser() -> Parser:
    parser = Parser(prog="specmla.bench", description="Measure specmla.")
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
    add("--heads", nargs="+", type=at_least(1), default=[16], help="query heads (default 16)")
    add("--impl", nargs="+", required=True, metavar="NAME", help="providers; ratios to the first")
    add("--page-size", type=at_least(1), default=64, help="tokens a page (default 64)")
    add("--mask", choices=[m.value for m in DraftMask], default="causal")
    add("--cache-format", choices=QUANTISED_NAMES, help="quantised cache (default: plain rows)")
    add("--plot", type=Path, metavar="FILE", help="draw a bar chart (.png, .svg, .pdf)")
    add_dims(verify)
    add_peers(verify)
    add_reps(verify)
    add_common(verify)
    add_step(commands)
    add_grid(commands)
    add_plot(commands)
    add_layer(commands)
    add_prefill(commands)
    add_trees(commands)
    add_accept(commands)
    add_decode(commands)
    env = commands.add_parser("env", help="print versions, device and commit as JSON")
    env.set_defaults(run=lambda args, words: print(json.dumps(collect_env(words), indent=1)) or 0)
    return parser


def _verify(args: argparse.Namespace, words: Sequence[str]) -> int:
    mask = DraftMask(args.mask)
    for batch in args.batch:
        check_batch(batch, mask)
    packed = None
    if args.cache_format:
        packed = cache_format(args.cache_format, args.rank, args.rope, dtype=dtype_of(args))
    made = {"cache_format": packed} if packed else {}
    makers = [functools.partial(get_provider, n, peer_files(args), **made) for n in args.impl]
    for make in makers:
        make()  # an unknown name is refused before anything is measured
    check_outputs(args.json, args.plot)
    options = VerifyOptions(
        page_size=args.page_size,
        mask=mask,
        dtype=dtype_of(args),
        kv_lora_rank=args.rank,
        rope_dim=args.rope,
        device=args.device,
        reps=args.reps,
        seed=args.seed,
        cache_format=packed,
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


if __name__ == "__main__":
    sys.exit(main())
