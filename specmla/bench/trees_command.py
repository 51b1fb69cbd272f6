"""The `trees` command: its arguments and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from specmla.bench.arguments import (
    add_common,
    add_dims,
    add_reps,
    at_least,
    check_outputs,
    dtype_of,
)
from specmla.bench.environment import collect_env
from specmla.bench.report import write_json
from specmla.bench.timing import method
from specmla.bench.trees import TreeOptions, measure_trees, tree_lines
from specmla.verify.sampling import SamplingParams


def add_trees(commands: Any) -> None:
    """Add the command; its defaults are DeepSeek-V3's vocabulary and layers, trees of 16 rows."""
    parser = commands.add_parser(
        "trees", help="acceptance of trees after the model, and the move of accepted rows"
    )
    parser.set_defaults(run=_trees)
    add = parser.add_argument
    add("--requests", type=at_least(1), default=32, help="B (default 32)")
    add("--nodes", type=at_least(1), default=15, help="drafts a tree (default 15)")
    add("--vocab", type=at_least(2), default=129280, help="W (default 129280)")
    add("--layers", type=at_least(1), default=61, help="of the cache that moves (default 61)")
    add("--top-k", type=at_least(0), default=0, help="0 keeps all (default)")
    add("--top-p", type=float, default=1.0, help="1 keeps all (default)")
    add_dims(parser)
    add_reps(parser)
    add_common(parser)


def _trees(args: argparse.Namespace, words: Sequence[str]) -> int:
    check_outputs(args.json)
    options = TreeOptions(
        num_requests=args.requests,
        num_nodes=args.nodes,
        vocab_size=args.vocab,
        num_layers=args.layers,
        width=args.rank + args.rope,
        params=SamplingParams(1.0, args.top_k, args.top_p, seed=0),
        dtype=dtype_of(args),
        device=args.device,
        reps=args.reps,
        seed=args.seed,
    )
    rows = measure_trees(options)
    print(tree_lines(rows))
    if args.json is not None:
        env = collect_env(words) | {"mode": method(args.device)}
        names = ("requests", "nodes", "vocab", "layers", "top_k", "top_p")
        sizes = {name: getattr(args, name) for name in names}
        sizes["dtype"] = str(options.dtype).removeprefix("torch.")
        write_json(args.json, {"env": env, "options": sizes, "rows": rows})
    return 0
