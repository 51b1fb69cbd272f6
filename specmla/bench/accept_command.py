"""The `accept` command: its arguments and its output."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from specmla.bench.accept import (
    SAMPLINGS,
    AcceptOptions,
    accept_lines,
    copy_bandwidth,
    measure,
)
from specmla.bench.arguments import add_common, add_reps, at_least, check_outputs, dtype_of
from specmla.bench.environment import collect_env
from specmla.bench.progress import progress
from specmla.bench.report import WRONG, write_json
from specmla.bench.timing import method
from specmla.verify.rules.registry import LOSSLESS


def add_accept(commands: Any) -> None:
    """Add the command; its defaults are DeepSeek-V3's vocabulary, 32 requests and 4 drafts."""
    parser = commands.add_parser(
        "accept",
        help="acceptance: fused kernels, the rule in torch, and a sort with softmax",
        epilog="Fused decisions are compared with the rule in torch before they are timed. Logits "
        "are normal; with a spread of 4 some hundred ids have 0.9 of the mass, with 2 tens of "
        "thousands.",
    )
    parser.set_defaults(run=_accept)
    add = parser.add_argument
    add("--rule", nargs="+", choices=LOSSLESS, default=list(LOSSLESS), help="default: all")
    add("--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), help="default: all")
    add("--q", nargs="+", choices=["one-hot", "dense"], default=["one-hot", "dense"])
    add("--requests", type=at_least(1), default=32, help="requests (default 32)")
    add("--drafts", type=at_least(0), default=4, help="drafts of each (default 4)")
    add("--vocab", type=at_least(2), default=129_280, help="ids (default 129280)")
    add("--spread", nargs="+", type=float, default=[4.0], help="of the logits (default 4)")
    add("--seed", type=at_least(0), default=0, help="of the random inputs (default 0)")
    add_reps(parser)
    add_common(parser)


def _accept(args: argparse.Namespace, words: Sequence[str]) -> int:
    check_outputs(args.json)
    all_options = [
        AcceptOptions(
            requests=args.requests,
            drafts=args.drafts,
            vocab=args.vocab,
            spread=spread,
            dtype=dtype_of(args),
            device=args.device,
            reps=args.reps,
            seed=args.seed,
        )
        for spread in args.spread
    ]
    bandwidth = copy_bandwidth(all_options[0])
    work = list(itertools.product(all_options, args.rule, args.sampling, args.q))
    rows: list[dict[str, Any]] = []
    with progress(len(work)) as tell:
        for options, rule, sampling, q in work:
            tell(f"{rule}, {sampling}, {q} q")
            rows += measure(rule, sampling, q == "dense", options, bandwidth)
    print(accept_lines(rows, bandwidth))
    if args.json is not None:
        env = collect_env(words) | {"mode": method(args.device)}
        write_json(args.json, {"env": env, "copy_bytes_per_s": bandwidth, "rows": rows})
    return 1 if any(row["status"] == WRONG for row in rows) else 0
