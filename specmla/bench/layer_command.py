"""The `layer` command: its arguments and its output."""

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
from specmla.bench.layer import LayerOptions, WrongResultError, layer_lines, measure_layer
from specmla.bench.report import write_json
from specmla.bench.timing import method
from specmla.bench.verify import check_batch
from specmla.config import MLAConfig
from specmla.mask import DraftMask

BATCHES = ["1q4s8k", "32q4s8k", "128q4s4k"]


def add_layer(commands: Any) -> None:
    """Add the command; its defaults are one layer of DeepSeek-V3 on one of eight GPUs."""
    parser = commands.add_parser(
        "layer",
        help="one layer's verify: store, absorb, attend, lift, eager and captured",
        epilog="A batch is [count]q<rows>s<tokens>: 32q4s8k is 32 requests of 4 new rows and 8192 "
        "cached tokens, the new rows included.",
    )
    parser.set_defaults(run=_layer)
    add = parser.add_argument
    add("--batch", nargs="+", default=BATCHES, metavar="SPEC", help=f"default {' '.join(BATCHES)}")
    add("--heads", type=at_least(1), default=16, help="query heads (default 16: TP8)")
    add("--hidden", type=at_least(1), default=7168, help="hidden size (default 7168)")
    add("--q-rank", type=at_least(0), default=1536, help="q_lora_rank, 0 for none (default 1536)")
    add("--nope", type=at_least(1), default=128, help="qk_nope_head_dim (default 128)")
    add("--value", type=at_least(1), default=128, help="v_head_dim (default 128)")
    add("--page-size", type=at_least(1), default=64, help="tokens a page (default 64)")
    add("--batch-invariant", action="store_true", help="bits of a row don't depend on the batch")
    add("--codes", action="store_true", help="kv_b_proj as e4m3 codes, widened in registers")
    add("--impl", metavar="NAME", help="backend (default: the best that serves)")
    add_dims(parser)
    add_reps(parser)
    add_common(parser)


def _layer(args: argparse.Namespace, words: Sequence[str]) -> int:
    for batch in args.batch:
        check_batch(batch, DraftMask.CAUSAL)
    check_outputs(args.json)
    options = LayerOptions(
        dims=MLAConfig(
            hidden_size=args.hidden,
            num_heads=args.heads,
            kv_lora_rank=args.rank,
            qk_nope_head_dim=args.nope,
            qk_rope_head_dim=args.rope,
            v_head_dim=args.value,
            q_lora_rank=args.q_rank or None,
        ),
        page_size=args.page_size,
        backend=args.impl,
        dtype=dtype_of(args),
        device=args.device,
        reps=args.reps,
        seed=args.seed,
        batch_invariant=args.batch_invariant,
        codes=args.codes,
    )
    rows: list[dict[str, Any]] = []
    status = 0
    for batch in args.batch:
        try:
            rows += measure_layer(batch, options)
        except WrongResultError as error:
            print(f"{batch}: {error}")
            status = 1
    print(layer_lines(rows))
    if args.json is not None:
        env = collect_env(words) | {"mode": method(args.device)}
        write_json(args.json, {"env": env, "rows": rows})
    return status
