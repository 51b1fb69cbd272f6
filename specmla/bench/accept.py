"""Times acceptance at a real vocabulary: fused kernels, the rule in torch, and a sort with softmax.

Every figure stands beside the time of reading what acceptance must read, logits and draft
distributions, once at the bandwidth of a copy that is measured on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmla.bench.accept_forms import AcceptOptions, Data, Form, make_batch, make_data
from specmla.bench.report import FAILED, REFUSED, TIMED, WRONG
from specmla.bench.timing import num_copies, time_calls
from specmla.errors import SpecMLAError
from specmla.verify.accept import decide, find_rule, greedy, step_numbers
from specmla.verify.fused import check_impl
from specmla.verify.sampling import SamplingBatch, processed_probs, row_top
from specmla.verify.tree_judge import TreeStep, decide_trees
from specmla.verify.tree_rules import follow

AIMS = {"greedy": 2.0, "plain": 2.0}
"""Times the read time, of chains; 5 for what is not listed."""

PROVIDERS = ("triton", "torch", "sort")
COPY_BYTES = 2**30
MOST_DIFFERING = 1
"""Requests of a step that may differ from the rule in torch: numbers on a border."""


def copy_bandwidth(options: AcceptOptions) -> float:
    """Measure bytes a second, read and written, of a large copy on the device."""
    size = COPY_BYTES if options.device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=options.device)
    to = torch.empty_like(source)
    timing = time_calls([lambda: to.copy_(source)], options.device, reps=options.reps)
    return 2 * size / (timing.us * 1e-6)


def measure(form: Form, options: AcceptOptions, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Give one row for each provider; of a lossy rule there are no kernels."""
    batch = make_batch(form, options)
    first = make_data(form, options, options.seed)
    more = range(1, num_copies(first.nbytes, options.device))
    copies = [first, *(make_data(form, options, options.seed + i) for i in more)]
    read_us = 1e6 * first.nbytes / bandwidth
    shared: dict[str, Any] = {
        "shape": form.shape,
        "rule": form.rule,
        "sampling": form.sampling,
        "q": form.q,
        "requests": options.requests,
        "drafts": first.drafts.shape[1],
        "vocab": options.vocab,
        "spread": options.spread,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device.type,
        "bytes": first.nbytes,
        "read_us": read_us,
        "aim": None if form.shape == "tree" or form.is_lossy else AIMS.get(form.sampling, 5.0),
    }
    for provider in PROVIDERS[form.is_lossy :]:
        yield shared | _row(provider, form.rule, batch, copies, options, read_us)


def _row(
    provider: str,
    rule: str,
    batch: SamplingBatch,
    copies: Sequence[Data],
    options: AcceptOptions,
    read_us: float,
) -> dict[str, Any]:
    row = {"provider": provider, "us": None, "us_p10": None, "us_p90": None, "times_read": None}
    call = {"triton": fused, "torch": _pure, "sort": _sorted}[provider]
    run = partial(call, rule, batch)
    try:
        if provider == "triton":
            check_impl("triton", find_rule(rule), options.device)
            differing = int((run(copies[0]) != _pure(rule, batch, copies[0])).any(1).sum())
            if differing > MOST_DIFFERING:
                reason = f"{differing} of {options.requests} requests differ from the rule in torch"
                return row | {"status": WRONG, "reason": reason}
        timing = time_calls(
            [partial(run, data) for data in copies],
            options.device,
            reps=options.reps,
            limit_s=options.row_seconds,
        )
    except SpecMLAError as error:
        return row | {"status": REFUSED, "reason": str(error)}
    except RuntimeError as error:  # the others are measured all the same
        return row | {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    figures = {**timing._asdict(), "times_read": timing.us / read_us}
    return row | figures | {"status": TIMED, "reason": None}


def fused(rule: str, batch: SamplingBatch, data: Data) -> Tensor:
    """Give the emitted tokens [B, K + 1] by the kernels."""
    from specmla.kernels.accept import AcceptInputs, Filters, fused_accept
    from specmla.kernels.accept_tree import fused_accept_tree

    inputs = AcceptInputs(data.logits, data.table, data.drafts, data.q, batch.seeds, data.positions)
    min_p = batch.top_p if batch.min_p is None else batch.min_p
    if batch.any_filter and batch.min_p is None:
        min_p = torch.zeros_like(batch.top_p)
    filters = Filters(batch.temperature, batch.top_k, batch.top_p, min_p, batch.any_filter)
    if data.tree is None:
        return fused_accept(inputs, filters, rule).packed[:, :-3]
    shape = (data.tree.parents, data.tree.ranks, data.tree.depths)
    return fused_accept_tree(inputs, filters, shape, rule).tokens


def _pure(rule: str, batch: SamplingBatch, data: Data) -> Tensor:
    """Emitted tokens by the rule in torch, as a step decides them."""
    rows, drafts = data.logits.view(*data.table.shape, -1), data.drafts
    if batch.all_greedy:
        top = row_top(rows).token
        return (greedy(top, drafts) if data.tree is None else follow(top, drafts, data.tree)[0])[2]
    probs = processed_probs(rows, batch).probs
    if data.tree is not None:
        step = TreeStep(data.tree, probs, drafts, data.q)
        return decide_trees(find_rule(rule), step, batch.seeds, data.positions)[0].tokens
    terms = find_rule(rule)(probs, drafts, data.q)
    u = step_numbers(terms.ending, batch.seeds, data.positions, drafts.shape[1])
    return decide(terms, drafts, u.accept, u.correction).tokens


def _sorted(rule: str, batch: SamplingBatch, data: Data) -> Tensor:
    """What a sampler that sorts does before it decides anything."""
    ordered, _ = torch.sort(data.logits.float(), dim=-1, descending=True)
    return torch.softmax(ordered, dim=-1)


def accept_lines(rows: Sequence[dict[str, Any]], bandwidth: float) -> str:
    """Format the rows for people."""
    lines = [
        f"copy bandwidth {bandwidth / 1e12:.3f} TB/s; x read: times the time of reading logits "
        "and q once at that bandwidth",
        f"{'shape':5} {'rule':12} {'sampling':12} {'q':7} {'spread':>6} {'provider':8} {'us':>10} "
        f"{'x read':>7} {'aim':>4}",
    ]
    for r in rows:
        head = f"{r['shape']:5} {r['rule']:12} {r['sampling']:12} {r['q']:7} {r['spread']:6.1f} "
        head += f"{r['provider']:8}"
        if r["status"] == TIMED:
            aim = "-" if r["aim"] is None else f"{r['aim']:.0f}"
            lines.append(f"{head} {r['us']:10.2f} {r['times_read']:7.2f} {aim:>4}")
        else:
            lines.append(f"{head} {r['status']}: {r['reason']}")
    return "\n".join(lines)
