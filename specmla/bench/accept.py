"""Times acceptance at a real vocabulary: fused kernels, the rule in torch, and a sort with softmax.

Every figure stands beside the time of reading what acceptance must read, logits and draft
distributions, once at the bandwidth of a copy that is measured on the same device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmla.bench.report import REFUSED, TIMED, WRONG
from specmla.bench.timing import num_copies, time_calls
from specmla.errors import SpecMLAError
from specmla.verify.accept import decide, find_rule, step_numbers
from specmla.verify.fused import check_impl
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs

SAMPLINGS = {
    "plain": SamplingParams(1.0),
    "min-p": SamplingParams(1.0, min_p=0.02),
    "top-k": SamplingParams(1.0, 50),
    "top-p": SamplingParams(1.0, 0, 0.9),
    "top-k+top-p": SamplingParams(1.0, 50, 0.9),
}
"""Sampling parameters that are timed, the same for all requests of a step."""

AIMS = {"plain": 2.0}
"""Times the read time; 5 for what is not listed."""

PROVIDERS = ("triton", "torch", "sort")
COPY_BYTES = 2**30
MOST_DIFFERING = 1
"""Requests of a step that may differ from the rule in torch: numbers on a border."""


@dataclass(frozen=True)
class AcceptOptions:
    """What all rows of a run share.

    Attributes:
        requests, drafts, vocab: B, K and W.
        spread: standard deviation of the normal logits.
        dtype: of the logits; q is float32.
        device: where it runs.
        reps: timed repetitions.
        seed: of the data.
    """

    requests: int
    drafts: int
    vocab: int
    spread: float
    dtype: torch.dtype
    device: torch.device
    reps: int
    seed: int = 0


class Data(NamedTuple):
    """One copy of a step's inputs."""

    logits: Tensor
    table: Tensor
    drafts: Tensor
    q: Tensor | None
    positions: Tensor


def copy_bandwidth(options: AcceptOptions) -> float:
    """Measure bytes a second, read and written, of a large copy on the device."""
    size = COPY_BYTES if options.device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=options.device)
    to = torch.empty_like(source)
    timing = time_calls([lambda: to.copy_(source)], options.device, reps=options.reps)
    return 2 * size / (timing.us * 1e-6)


def make_data(options: AcceptOptions, dense: bool, seed: int) -> Data:
    """Draw logits, and drafts from a q that lies near p."""
    b, k, width, device = options.requests, options.drafts, options.vocab, options.device
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    logits = (normal(b, k + 1, width) * options.spread).to(options.dtype)
    q = torch.softmax(logits[:, :k].float() + normal(b, k, width) / 2, -1)
    drafts = torch.zeros(b, k, dtype=torch.int64, device=device)
    if k:
        drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(b, k)
    table = torch.arange(b * (k + 1), device=device).view(b, k + 1)
    positions = torch.arange(b, device=device) * 13 + 100
    return Data(logits.flatten(0, 1), table, drafts, q if dense else None, positions)


def measure(
    rule: str, sampling: str, dense: bool, options: AcceptOptions, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Give one row for each provider."""
    params = [dataclasses.replace(SAMPLINGS[sampling], seed=i) for i in range(options.requests)]
    batch = SamplingBatch.build(params, options.device)
    first = make_data(options, dense, options.seed)
    size = first.logits.nbytes + (0 if first.q is None else first.q.nbytes)
    more = range(1, num_copies(size, options.device))
    copies = [first, *(make_data(options, dense, options.seed + i) for i in more)]
    read_us = 1e6 * size / bandwidth
    shared: dict[str, Any] = {
        "rule": rule,
        "sampling": sampling,
        "q": "dense" if dense else "one-hot",
        "requests": options.requests,
        "drafts": options.drafts,
        "vocab": options.vocab,
        "spread": options.spread,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device.type,
        "bytes": size,
        "read_us": read_us,
        "aim": AIMS.get(sampling, 5.0),
    }
    for provider in PROVIDERS:
        yield shared | _row(provider, rule, batch, copies, options, read_us)


def _row(
    provider: str,
    rule: str,
    batch: SamplingBatch,
    copies: Sequence[Data],
    options: AcceptOptions,
    read_us: float,
) -> dict[str, Any]:
    empty = {"provider": provider, "us": None, "us_p10": None, "us_p90": None, "times_read": None}
    call = {"triton": _fused, "torch": _pure, "sort": _sorted}[provider]
    run = partial(call, rule, batch)
    if provider == "triton":
        try:
            check_impl("triton", find_rule(rule), options.device)
        except SpecMLAError as error:
            return empty | {"status": REFUSED, "reason": str(error)}
        differing = int((run(copies[0]) != _pure(rule, batch, copies[0])).any(1).sum())
        if differing > MOST_DIFFERING:
            reason = f"{differing} of {options.requests} requests differ from the rule in torch"
            return empty | {"status": WRONG, "reason": reason}
    timing = time_calls([partial(run, data) for data in copies], options.device, reps=options.reps)
    figures = {**timing._asdict(), "times_read": timing.us / read_us}
    return {"provider": provider, **figures, "status": TIMED, "reason": None}


def _fused(rule: str, batch: SamplingBatch, data: Data) -> Tensor:
    """Emitted tokens by the kernels."""
    from specmla.kernels.accept import AcceptInputs, Filters, fused_accept

    inputs = AcceptInputs(data.logits, data.table, data.drafts, data.q, batch.seeds, data.positions)
    min_p = batch.top_p if batch.min_p is None else batch.min_p
    if batch.any_filter and batch.min_p is None:
        min_p = torch.zeros_like(batch.top_p)
    filters = Filters(batch.temperature, batch.top_k, batch.top_p, min_p, batch.any_filter)
    return fused_accept(inputs, filters, rule).packed[:, :-3]


def _pure(rule: str, batch: SamplingBatch, data: Data) -> Tensor:
    """Emitted tokens by the rule in torch."""
    rows = data.logits.view(*data.table.shape, -1)
    terms = find_rule(rule)(processed_probs(rows, batch).probs, data.drafts, data.q)
    u = step_numbers(terms.ending, batch.seeds, data.positions, data.drafts.shape[1])
    return decide(terms, data.drafts, u.accept, u.correction).tokens


def _sorted(rule: str, batch: SamplingBatch, data: Data) -> Tensor:
    """What a sampler that sorts does before it decides anything."""
    ordered, _ = torch.sort(data.logits.float(), dim=-1, descending=True)
    return torch.softmax(ordered, dim=-1)


def accept_lines(rows: Sequence[dict[str, Any]], bandwidth: float) -> str:
    """Format the rows for people."""
    lines = [
        f"copy bandwidth {bandwidth / 1e12:.3f} TB/s; x read: times the time of reading logits "
        "and q once at that bandwidth",
        f"{'rule':12} {'sampling':12} {'q':7} {'spread':>6} {'provider':8} {'us':>10} "
        f"{'x read':>7} {'aim':>4}",
    ]
    for r in rows:
        head = f"{r['rule']:12} {r['sampling']:12} {r['q']:7} {r['spread']:6.1f} {r['provider']:8}"
        if r["status"] == TIMED:
            lines.append(f"{head} {r['us']:10.2f} {r['times_read']:7.2f} {r['aim']:4.0f}")
        else:
            lines.append(f"{head} {r['status']}: {r['reason']}")
    return "\n".join(lines)
