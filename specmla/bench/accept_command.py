"""The `accept` command: its arguments and its output."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from specmla.bench.accept import accept_lines, copy_bandwidth, measure
from specmla.bench.accept_forms import SAMPLINGS, SHAPES, AcceptOptions, Form, list_forms
from specmla.bench.accept_warm import warm_in_processes
from specmla.bench.arguments import add_common, add_reps, at_least, check_outputs, dtype_of
from specmla.bench.environment import collect_env
from specmla.bench.progress import progress
from specmla.bench.report import WRONG, write_json
from specmla.bench.timing import method
from specmla.bench.within_budget import within_budget
from specmla.verify.rules.registry import RULES

WARM_SHARE = 0.6
"""Of a budget, that compiling ahead may take."""


def add_accept(commands: Any) -> None:
    """Add the command; its defaults are DeepSeek-V3's vocabulary, 32 requests and 4 drafts."""
    parser = commands.add_parser(
        "accept",
        help="acceptance: fused kernels, the rule in torch, and a sort with softmax",
        epilog="Fused decisions are compared with the rule in torch before they are timed. Logits "
        "are normal; with a spread of 4 some hundred ids have 0.9 of the mass, with 2 tens of "
        "thousands. The file is written after each form.",
    )
    parser.set_defaults(run=_accept)
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: both")
    add("--rule", nargs="+", choices=RULES, default=list(RULES), help="default: all")
    add("--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), help="default: all")
    add("--q", nargs="+", choices=["one-hot", "dense"], default=["one-hot", "dense"])
    add("--requests", type=at_least(1), default=32, help="requests (default 32)")
    add("--drafts", type=at_least(0), default=4, help="drafts of each chain (default 4)")
    add("--nodes", type=at_least(1), default=15, help="drafts of each tree (default 15)")
    add("--vocab", type=at_least(2), default=129_280, help="ids (default 129280)")
    add("--spread", nargs="+", type=float, default=[4.0], help="of the logits (default 4)")
    add("--seed", type=at_least(0), default=0, help="of the random inputs (default 0)")
    add("--budget", type=at_least(1), metavar="SECONDS", help="stop in time, with what there is")
    text = "compile in N processes side by side first (default 0: as forms are run)"
    add("--warm-processes", type=at_least(0), default=0, metavar="N", help=text)
    add_reps(parser)
    add_common(parser)


def _accept(args: argparse.Namespace, words: Sequence[str]) -> int:
    start = time.monotonic()
    check_outputs(args.json)
    all_options = [_options(args, spread) for spread in args.spread]
    forms = list(list_forms(args.shape, args.rule, args.sampling, args.q))
    work = list(itertools.product(all_options, forms))
    if args.warm_processes:
        limit = 600.0 if args.budget is None else WARM_SHARE * args.budget
        for line in warm_in_processes(forms, all_options[0], args.warm_processes, limit):
            print(line, file=sys.stderr)
        print(f"compiled ahead in {time.monotonic() - start:.1f} s", file=sys.stderr)
    bandwidth = copy_bandwidth(all_options[0])
    env = collect_env(words) | {"mode": method(args.device)}
    content: dict[str, Any] = {"env": env, "copy_bytes_per_s": bandwidth, "rows": []}
    done = _measure_all(work, content, args, start)
    print(accept_lines(content["rows"], bandwidth))
    if done < len(work):
        print(f"{len(work) - done} of {len(work)} forms did not fit into {args.budget} s")
    return 1 if any(row["status"] == WRONG for row in content["rows"]) else 0


def _measure_all(
    work: Sequence[tuple[AcceptOptions, Form]],
    content: dict[str, Any],
    args: argparse.Namespace,
    start: float,
) -> int:
    """Measure forms until the budget is spent; gives how many."""
    budget, done = float("inf") if args.budget is None else args.budget, 0
    with progress(len(work)) as tell:
        for options, form in within_budget(work, budget, time.monotonic, start):
            tell(f"{form.shape}, {form.rule}, {form.sampling}, {form.q} q")
            content["rows"] += measure(form, options, content["copy_bytes_per_s"])
            done += 1
            content["forms_left"] = len(work) - done
            if args.json is not None:
                write_json(args.json, content)
    return done


def _options(args: argparse.Namespace, spread: float) -> AcceptOptions:
    return AcceptOptions(
        requests=args.requests,
        drafts=args.drafts,
        vocab=args.vocab,
        nodes=args.nodes,
        spread=spread,
        dtype=dtype_of(args),
        device=args.device,
        reps=args.reps,
        seed=args.seed,
    )
