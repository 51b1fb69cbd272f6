"""Checks providers against float64, then times them on one layer's verify."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specmla.backends.base import AttentionOutput, Requirements
from specmla.bench.cost import verify_cost
from specmla.bench.provider import Provider
from specmla.bench.report import REFUSED, WRONG, VerifyRow
from specmla.bench.timing import host_us, method, num_copies, time_calls
from specmla.cache.formats.base import CacheFormat
from specmla.errors import SpecMLAError, require
from specmla.mask import MAX_TREE_NODES, DraftMask
from specmla.query import QueryLenSupport
from specmla.reference import absorbed_mqa
from specmla.testing import (
    VerifyCase,
    assert_attention_within_budget,
    make_case,
    parse_batch,
    relative_error,
)

NOPE_HEAD_DIM = 128
"""P of DeepSeek-V2/V3, for the softmax scale; no width of the absorbed form tells it."""


@dataclass(frozen=True)
class VerifyOptions:
    """What all rows of a run share: G, mask, dtype, C, R, device, timed repetitions, data seed,
    and a quantised cache format or None for plain rows."""

    page_size: int
    mask: DraftMask
    dtype: torch.dtype
    kv_lora_rank: int
    rope_dim: int
    device: torch.device
    reps: int
    seed: int = 0
    cache_format: CacheFormat | None = None


@dataclass(frozen=True)
class Oracle:
    """The absorbed form in float64, and what its error budget is measured on.

    Attributes:
        exact: computed in float64 on the same inputs.
        plain: computed in the dtype of the inputs.
        plain_lse: [T, H], computed in float32.
    """

    exact: AttentionOutput
    plain: AttentionOutput
    plain_lse: torch.Tensor


def check_batch(batch: str, mask: DraftMask) -> None:
    """Refuse a batch that no provider could run.

    Raises:
        ArgumentError: it can't be read, has no rows, or its trees are too large.
    """
    rows = [lens.query_len for lens in parse_batch(batch)]
    found = []
    if not any(rows):
        found.append("it has no query rows, accepted is at least one")
    if mask is DraftMask.TREE and max(rows) > MAX_TREE_NODES:
        found.append(f"it has {max(rows)} rows a request, a tree holds at most {MAX_TREE_NODES}")
    require(found, f"batch {batch!r}")


def run_batch(
    batch: str, num_heads: int, makers: Sequence[Callable[[], Provider]], options: VerifyOptions
) -> Iterator[VerifyRow]:
    """Give one row for each provider, the ratio taken to the first one that has a figure.

    Providers are made here, one after the other, so that each one's scratch is its own.
    """
    case = make_case(
        batch,
        num_heads=num_heads,
        kv_lora_rank=options.kv_lora_rank,
        rope_dim=options.rope_dim,
        page_size=options.page_size,
        dtype=options.dtype,
        device=options.device,
        mask=options.mask,
        seed=options.seed,
        cache_format=options.cache_format,
        softmax_scale=(NOPE_HEAD_DIM + options.rope_dim) ** -0.5,
    )
    oracle = compute_oracle(case)
    first_us = None
    for make in makers:
        row = _row(make(), case, oracle, batch, options)
        first_us = row.us if first_us is None else first_us
        if row.us is not None and first_us is not None:
            row = dataclasses.replace(row, ratio=row.us / first_us)
        yield row


def compute_oracle(case: VerifyCase) -> Oracle:
    """Run the specification in float64, in the case's dtype and in float32, request by request."""
    part, scale = case.tables(), case.softmax_scale

    def attend(dtype: torch.dtype) -> AttentionOutput:
        q_latent, q_rope = case.q_latent.to(dtype), case.q_rope.to(dtype)
        return absorbed_mqa(q_latent, q_rope, case.rows(), part, softmax_scale=scale)

    return Oracle(attend(torch.float64), attend(case.spec.dtype), attend(torch.float32).lse)


def requirements(case: VerifyCase) -> Requirements:
    """Say what a provider must serve to run `case`."""
    lens = {r.query_len for r in case.requests}
    shape = QueryLenSupport.UNIFORM if len(lens) == 1 else QueryLenSupport.VARLEN
    return Requirements(
        device=torch.device(case.spec.device),
        dtype=case.spec.dtype,
        num_heads=case.spec.num_heads,
        kv_lora_rank=case.spec.kv_lora_rank,
        qk_rope_head_dim=case.spec.rope_dim,
        page_size=case.spec.page_size,
        masks=frozenset({case.spec.mask}),
        query_len_support=QueryLenSupport.SINGLE_ONLY if lens == {1} else shape,
        format=case.spec.cache_format,
    )


def _row(
    provider: Provider, case: VerifyCase, oracle: Oracle, batch: str, options: VerifyOptions
) -> VerifyRow:
    row = VerifyRow(
        batch=batch,
        heads=case.spec.num_heads,
        mask=options.mask.value,
        page_size=options.page_size,
        dtype=str(options.dtype).removeprefix("torch."),
        provider=provider.name,
        cache_format=options.cache_format.name if options.cache_format else None,
    )
    problems = provider.problems(requirements(case))
    if problems:
        return dataclasses.replace(row, status=REFUSED, reason="; ".join(problems))
    try:
        plan, got, scratch = _first_call(provider, case)
    except SpecMLAError as error:
        return dataclasses.replace(row, status=REFUSED, reason=str(error))
    rel_err = relative_error(got.out, oracle.exact.out)
    row = dataclasses.replace(row, rel_err=rel_err if math.isfinite(rel_err) else None)
    try:
        assert_attention_within_budget(
            got,
            oracle.exact,
            oracle.plain,
            oracle.plain_lse,
            score_width=case.spec.width,
        )
    except AssertionError as wrong:
        return dataclasses.replace(row, status=WRONG, reason=f"wrong result, not timed: {wrong}")
    return dataclasses.replace(
        row, scratch_bytes=scratch, **_figures(provider, case, plan, options)
    )


def _first_call(provider: Provider, case: VerifyCase) -> tuple[Any, AttentionOutput, int | None]:
    """Plan and run once; the third value is the peak device memory beyond the outputs."""
    device = torch.device(case.spec.device)
    if device.type != "cuda":
        plan = provider.plan(case)
        return plan, provider.result(provider.run(case, case.latent_cache, plan), plan), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    plan = provider.plan(case)
    got = provider.run(case, case.latent_cache, plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return plan, provider.result(got, plan), peak - got.out.nbytes - got.lse.nbytes


def _figures(
    provider: Provider, case: VerifyCase, plan: Any, options: VerifyOptions
) -> dict[str, Any]:
    cost = verify_cost(
        [r.query_len for r in case.requests],
        [r.seq_len for r in case.requests],
        num_heads=case.spec.num_heads,
        kv_lora_rank=case.spec.kv_lora_rank,
        qk_rope_head_dim=case.spec.rope_dim,
        itemsize=case.latent_cache.element_size(),
    )
    device = options.device
    copies = num_copies(cost.cache_bytes, device)
    caches = [case.latent_cache, *(case.latent_cache.clone() for _ in range(copies - 1))]
    calls = [functools.partial(provider.run, case, cache, plan) for cache in caches]
    timing = time_calls(calls, device, reps=options.reps)
    return {
        "us": timing.us,
        "us_p10": timing.us_p10,
        "us_p90": timing.us_p90,
        "gbps": cost.gbps(timing.us),
        "tflops": cost.tflops(timing.us),
        "plan_us": host_us(lambda: provider.plan(case), device, reps=options.reps),
        "method": method(device),
    }
