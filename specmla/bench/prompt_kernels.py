"""Times kernels for prompts after checking their last rows against float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmla.bench.prompt_providers import PromptProvider, Prompts
from specmla.bench.report import FAILED, REFUSED, TIMED, WRONG
from specmla.bench.timing import time_calls
from specmla.errors import SpecMLAError, require
from specmla.host_tables import running_starts
from specmla.metadata import PrefillPart
from specmla.testing import assert_within_budget, parse_batch, relative_error

CHECKED_ROWS = 32


@dataclass(frozen=True)
class KernelOptions:
    """H, D = P + R, V, dtype, device and timed repetitions."""

    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    reps: int


def check_prompts(batch: str) -> None:
    """Refuse a batch that is none of prompts without context.

    Raises:
        ArgumentError: it can't be read, or a request has cached context or no rows.
    """
    odd = [lens for lens in parse_batch(batch) if lens.query_len != lens.seq_len]
    require(
        [f"it has {odd[0].query_len} rows of {odd[0].seq_len} tokens, accepted is all of them"]
        if odd
        else [],
        f"batch {batch!r}",
    )


@torch.no_grad()
def measure_kernels(
    batch: str, providers: Mapping[str, PromptProvider], options: KernelOptions
) -> Iterator[dict[str, Any]]:
    """Give a row for each provider: its time and rate, or why there is none."""
    prompts = _make_prompts(batch, options)
    exact, plain = (_last_rows(prompts, dtype) for dtype in (torch.float64, options.dtype))
    pairs = sum(n * (n + 1) // 2 for n in prompts.part.query_lens)
    flops = 2 * pairs * options.heads * (options.width + options.value_width)
    for name, provider in providers.items():
        row = {
            "batch": batch,
            "heads": options.heads,
            "width": options.width,
            "value_width": options.value_width,
            "dtype": str(options.dtype).removeprefix("torch."),
            "device": options.device.type,
            "provider": name,
        }
        yield row | _figures(provider, prompts, exact, plain, flops, options)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row the rate over the best one of its batch, None without a figure."""
    best: dict[str, float] = {}
    for r in rows:
        if r["us"] is not None:
            best[r["batch"]] = min(r["us"], best.get(r["batch"], r["us"]))
    return [r | {"of_best": None if r["us"] is None else best[r["batch"]] / r["us"]} for r in rows]


def kernel_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows for people."""
    lines = [
        f"{'batch':14} {'provider':10} {'µs':>10} {'TFLOP/s':>8} {'of best':>8} {'rel err':>9}"
    ]
    for r in rows:
        if r["us"] is None:
            lines.append(f"{r['batch']:14} {r['provider']:10} {r['status']}: {r['reason']}")
        else:
            lines.append(
                f"{r['batch']:14} {r['provider']:10} {r['us']:10.1f} {r['tflops']:8.1f} "
                f"{r['of_best']:8.2f} {r['rel_err']:9.2e}"
            )
    return "\n".join(lines)


def _figures(
    provider: PromptProvider,
    prompts: Prompts,
    exact: Tensor,
    plain: Tensor,
    flops: int,
    options: KernelOptions,
) -> dict[str, Any]:
    row: dict[str, Any] = {"status": REFUSED, "us": None, "tflops": None, "rel_err": None}
    found = provider.problems(prompts)
    if found:
        return row | {"reason": "; ".join(found)}
    try:
        got = provider.run(prompts)
    except (SpecMLAError, RuntimeError, TypeError) as error:  # a peer says so by raising
        return row | {"reason": str(error).splitlines()[0]}
    last = min(CHECKED_ROWS, prompts.part.query_lens[0])
    end = prompts.part.query_lens[0]
    checked = got[end - last : end]
    row["rel_err"] = relative_error(checked, exact)
    try:
        assert_within_budget(checked, exact, plain)
    except AssertionError as wrong:
        return row | {"status": WRONG, "rel_err": None, "reason": str(wrong)}
    try:
        timing = time_calls([partial(provider.run, prompts)], options.device, reps=options.reps)
    except RuntimeError as error:
        reason = f"it can't be captured in a CUDA graph: {str(error).splitlines()[0]}"
        return row | {"status": FAILED, "reason": reason}
    return row | {
        "status": TIMED,
        "us": timing.us,
        "us_p10": timing.us_p10,
        "us_p90": timing.us_p90,
        "tflops": flops / timing.us / 1e6,
    }


def _make_prompts(batch: str, options: KernelOptions) -> Prompts:
    lens = tuple(request.query_len for request in parse_batch(batch))
    device, total = options.device, sum(lens)
    generator = torch.Generator(device).manual_seed(0)

    def normal(width: int) -> Tensor:
        shape = (total, options.heads, width)
        return torch.randn(shape, generator=generator, dtype=options.dtype, device=device)

    starts = torch.tensor(running_starts(lens), dtype=torch.int32, device=device)
    part = PrefillPart(starts, starts, torch.arange(total, device=device), lens, lens)
    query, key, value = normal(options.width), normal(options.width), normal(options.value_width)
    return Prompts(query, key, value, part, options.width**-0.5)


def _last_rows(prompts: Prompts, dtype: torch.dtype) -> Tensor:
    """Attend the last rows of the first prompt in `dtype`, by definition."""
    end = prompts.part.query_lens[0]
    first = end - min(CHECKED_ROWS, end)
    query, key = prompts.query[first:end].to(dtype), prompts.key[:end].to(dtype)
    score = torch.einsum("thd,shd->hts", query, key) * prompts.scale
    hidden = torch.ones_like(score[0], dtype=torch.bool).triu_(first + 1)
    weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shv->thv", weight, prompts.value[:end].to(dtype))
