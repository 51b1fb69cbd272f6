"""Times one MLA layer's verify, part by part and as a whole, eager and in a CUDA graph.

The parts are those of the absorbed path: store the new rows, absorb W_UK into the queries, attend,
lift by W_UV. `four` runs them one after another; `layer` is the whole module, projections and
output included. On a GPU the calls rotate over copies of the cache and over layers with weights of
their own, as a model's do, so that L2 holds neither; see `timing`.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from specmla.backends.base import AttentionBackend
from specmla.backends.select import select_backend
from specmla.batch_split import BatchRules
from specmla.bench.layer_calls import PARTS, WHOLE, LayerCalls
from specmla.bench.points import Point
from specmla.bench.sample import sampled_oracle
from specmla.bench.timing import host_us, num_copies, time_calls
from specmla.bench.verify import requirements
from specmla.bench.workload import GridOptions, Workload, make_pool, make_workload
from specmla.builder import MetadataBuilder
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig
from specmla.e4m3_up_projection import E4M3UpProjection
from specmla.errors import SpecMLAError
from specmla.invariance import make_batch_invariant
from specmla.layer import MLAAttention
from specmla.metadata import StepMetadata
from specmla.weight_scales import CODES

Calls = Sequence[Callable[[], object]]


class WrongResultError(SpecMLAError):
    """The backend's result is outside its error budget: it isn't timed."""


@dataclass(frozen=True)
class LayerOptions:
    """What is run: dims of the layer, G, backend (the best if None), dtype, device, repetitions,
    whether the results are batch-invariant, and whether `kv_b_proj` is e4m3 codes."""

    dims: MLAConfig
    page_size: int
    backend: str | None
    dtype: torch.dtype
    device: torch.device
    reps: int
    seed: int = 0
    batch_invariant: bool = False
    codes: bool = False


class _Inputs(NamedTuple):
    """What the calls share, and what they rotate over."""

    work: Workload
    backend: AttentionBackend
    metadata: StepMetadata
    layers: list[MLAAttention]
    caches: list[LatentCache]
    plan_us: float


@torch.no_grad()
def measure_layer(batch: str, options: LayerOptions) -> list[dict[str, Any]]:
    """Check the backend on a batch, then time every part; one row a part.

    Raises:
        UnsupportedError: the backend can't serve the layer here.
        WrongResultError: its result is wrong.
    """
    inputs = _make_inputs(batch, options)
    rel_err = _check(inputs)
    shared = {
        "batch": batch,
        "heads": options.dims.num_heads,
        "hidden": options.dims.hidden_size,
        "page_size": options.page_size,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device.type,
        "backend": inputs.backend.capabilities.name,
        "batch_invariant": options.batch_invariant,
        "codes": options.codes,
        "rel_err": rel_err,
        "plan_us": inputs.plan_us,
    }
    figures = {part: _times(calls, options) for part, calls in _calls(inputs, options.dims).items()}
    figures["sum"] = {name: _sum(figures, name) for name in ("eager_us", "captured_us")}
    return [{**shared, "part": part, **values} for part, values in figures.items()]


def layer_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows for people."""
    lines = [f"{'batch':12} {'backend':10} {'part':8} {'eager µs':>10} {'captured µs':>12}"]
    lines += [
        f"{r['batch']:12} {r['backend']:10} {r['part']:8} {r['eager_us']:10.1f} "
        + (f"{r['captured_us']:12.1f}" if r["captured_us"] is not None else f"{'-':>12}")
        for r in rows
    ]
    return "\n".join(lines)


def eager_us(calls: Calls, device: torch.device, reps: int) -> float:
    """Median wall time of a call, queued by the host one after another and awaited at the end."""
    times = []
    for _ in range(reps + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e6 * (time.perf_counter() - start) / len(calls))
    return statistics.median(times[1:])


def _times(calls: Calls, options: LayerOptions) -> dict[str, float | None]:
    eager = eager_us(calls, options.device, options.reps)
    if options.device.type != "cuda":
        return {"eager_us": eager, "captured_us": None}
    timing = time_calls(calls, options.device, reps=options.reps)
    return {
        "eager_us": eager,
        "captured_us": timing.us,
        "captured_p10": timing.us_p10,
        "captured_p90": timing.us_p90,
    }


def _sum(figures: Mapping[str, Mapping[str, float | None]], name: str) -> float | None:
    values = [figures[part][name] for part in PARTS]
    return None if None in values else sum(value or 0.0 for value in values)


def _make_inputs(batch: str, options: LayerOptions) -> _Inputs:
    dims, device = options.dims, options.device
    point = Point(batch, dims.num_heads, page_size=options.page_size)
    sizes = GridOptions(
        options.dtype, dims.kv_lora_rank, dims.qk_rope_head_dim, device, options.seed
    )
    work = make_workload(point, make_pool([point], sizes), sizes)
    need = replace(requirements(work.case), batch_invariant=options.batch_invariant)
    backend = select_backend(need, options.backend)
    builder = MetadataBuilder(
        backend=backend,
        page_size=options.page_size,
        num_pages=work.case.latent_cache.shape[0],
        num_heads=dims.num_heads,
        kv_lora_rank=dims.kv_lora_rank,
        device=device,
        max_seq_len=max(r.seq_len for r in work.case.requests),
        dtype=options.dtype,
    )
    weight_bytes = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim) * dims.kv_lora_rank
    builder.configure(BatchRules(batch_invariant=options.batch_invariant))
    first = MLAAttention(dims).to(device, options.dtype)
    if options.codes:
        weight = first.kv_b_proj.weight
        codes, scale = (weight / 2.0**-12).to(CODES), weight.new_full((), 2.0**-12)
        first.kv_b_proj = E4M3UpProjection.from_codes(dims, codes, scale, options.dtype)
    if options.batch_invariant:
        make_batch_invariant(first)
    more = num_copies(weight_bytes * options.dtype.itemsize, device) - 1
    return _Inputs(
        work,
        backend,
        builder.build(work.case.requests),
        [first, *(copy.deepcopy(first) for _ in range(more))],
        [LatentCache.from_pool([window]) for window in work.windows],
        host_us(lambda: builder.build(work.case.requests), device, reps=options.reps),
    )


def _check(inputs: _Inputs) -> float:
    """Compare the backend with the specification on a few requests; gives the relative error."""
    case, part = inputs.work.case, inputs.metadata.verify
    assert part is not None
    got = inputs.backend.forward_mqa(
        case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=case.softmax_scale
    )
    oracle = sampled_oracle(case)
    wrong, _ = oracle.verdict(got, checks_lse=True)
    if wrong is not None:
        raise WrongResultError(f"wrong result, not timed: {wrong}")
    return oracle.relative_error(got)


def _calls(inputs: _Inputs, dims: MLAConfig) -> dict[str, Calls]:
    """Give the calls of each part, as many as there are layers or copies of the cache."""
    case = inputs.work.case
    made = LayerCalls.make(dims, inputs.backend, inputs.metadata, case.q_latent, case.q_rope)
    count = max(len(inputs.layers), len(inputs.caches))
    pairs = list(islice(zip(cycle(inputs.layers), cycle(inputs.caches), strict=False), count))
    return {
        name: [functools.partial(getattr(made, name), *pair) for pair in pairs]
        for name in (*PARTS, *WHOLE)
    }
