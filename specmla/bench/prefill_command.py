"""The `prefill` command: its arguments and its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmla.bench.arguments import (
    add_common,
    at_least,
    check_outputs,
    dtype_of,
    tokens,
)
from specmla.bench.environment import collect_env
from specmla.bench.prefill import PrefillOptions, measure_context, prefill_lines
from specmla.bench.progress import progress
from specmla.bench.prompt_kernels import (
    KernelOptions,
    check_prompts,
    kernel_lines,
    measure_kernels,
    with_ratios,
)
from specmla.bench.prompt_providers import get_prompt_provider
from specmla.bench.report import WRONG, write_json
from specmla.bench.timing import method
from specmla.config import MLAConfig

CONTEXTS = [1024 << i for i in range(8)]
KERNEL_BATCHES = ["1q8ks8k", "8q2ks2k", "2q32ks32k"]
PROVIDERS = ["triton", "sdpa", "flash", "cudnn", "flash-lse", "cudnn-lse", "fa3"]


def add_prefill(commands: Any) -> None:
    """Add the command; its defaults are DeepSeek-V3's dims."""
    parser = commands.add_parser(
        "prefill",
        help="prompts: in chunks against one pass, and our kernel against others",
        epilog="Rows of the two tables are told apart by 'form' (chunks or one pass) and "
        "'provider'. An empty --contexts or --kernel leaves that table out.",
    )
    parser.set_defaults(run=_prefill)
    add = parser.add_argument
    add("--contexts", nargs="*", type=tokens, default=CONTEXTS, help="cached tokens, 1k ... 128k")
    add("--rows", type=at_least(1), default=1024, help="new rows of a prompt (default 1024)")
    add("--workspace", nargs="+", type=tokens, default=[65536, 16384], help="rows of workspaces")
    add("--kernel", nargs="*", default=KERNEL_BATCHES, metavar="SPEC", help="e.g. 8q2ks2k")
    add("--providers", nargs="+", default=PROVIDERS, help="of --kernel")
    add("--heads", type=at_least(1), default=128, help="heads (default 128)")
    add("--rank", type=at_least(1), default=512, help="kv_lora_rank (default 512)")
    add("--nope", type=at_least(1), default=128, help="qk_nope_head_dim (default 128)")
    add("--rope", type=at_least(0), default=64, help="qk_rope_head_dim (default 64)")
    add("--value", type=at_least(1), default=128, help="v_head_dim (default 128)")
    add("--page-size", type=at_least(1), default=64, help="tokens a page (default 64)")
    add("--impl", metavar="NAME", help="backend of --contexts (default: the best that serves)")
    add("--fa3", type=Path, metavar="FILE", help="vLLM's operator library of FlashAttention-3")
    add("--reps", type=at_least(1), default=10, help="timed repetitions (default 10)")
    add_common(parser)


def _options(args: argparse.Namespace) -> PrefillOptions:
    return PrefillOptions(
        dims=MLAConfig(
            hidden_size=1,  # no projection from or to it is run here
            num_heads=args.heads,
            kv_lora_rank=args.rank,
            qk_nope_head_dim=args.nope,
            qk_rope_head_dim=args.rope,
            v_head_dim=args.value,
        ),
        rows=args.rows,
        workspace_rows=tuple(args.workspace),
        page_size=args.page_size,
        backend=args.impl,
        dtype=dtype_of(args),
        device=args.device,
        reps=args.reps,
    )


def _prefill(args: argparse.Namespace, words: Sequence[str]) -> int:
    for batch in args.kernel:
        check_prompts(batch)
    providers = {name: get_prompt_provider(name, args.fa3) for name in args.providers}
    check_outputs(args.json)
    options = _options(args)
    kernel = KernelOptions(
        args.heads, args.nope + args.rope, args.value, options.dtype, args.device, args.reps
    )
    chunked: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    with progress(len(args.contexts) + len(args.kernel)) as tell:
        for context in args.contexts:
            tell(f"context {context}")
            chunked += measure_context(context, options)
        for batch in args.kernel:
            tell(batch)
            kernels += measure_kernels(batch, providers, kernel)
    kernels = with_ratios(kernels)
    if chunked:
        print(prefill_lines(chunked))
    if kernels:
        print(kernel_lines(kernels))
    if args.json is not None:
        env = collect_env(words) | {"mode": method(args.device)}
        write_json(args.json, {"env": env, "rows": [*chunked, *kernels]})
    return 1 if any(row["status"] == WRONG for row in kernels) else 0
