"""Measures points of the grid: every provider checked first, then all timed in turns.

A point costs a fraction of a second: the pool is shared, the check looks at some requests, and the
timed rounds end when the medians stand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specmla.bench.ceilings import Ceilings
from specmla.bench.points import Point
from specmla.bench.pool import PagePool
from specmla.bench.provider import Provider
from specmla.bench.report import ABSENT, FAILED, REFUSED, WRONG, GridRow
from specmla.bench.rounds import Pass, Rounds, make_pass, time_rounds
from specmla.bench.sample import SampledOracle, sampled_oracle
from specmla.bench.timing import host_us
from specmla.bench.verify import requirements
from specmla.bench.workload import GridOptions, Workload, make_workload
from specmla.errors import SpecMLAError

PASS_US = 2000.0
"""A pass takes about this long or longer, so that the gap before it weighs little."""
FIXED_US = 8.0
"""Least time of a call beyond its floor, to guess how many calls make a pass."""
PLAN_REPS = 5
HOST_CALLS = 20


class Checked(NamedTuple):
    """A provider whose result is right, with its plan and the row so far."""

    provider: Provider
    plan: Any
    row: GridRow


def measure_point(
    point: Point,
    providers: Sequence[Provider],
    pool: PagePool,
    ceilings: Ceilings,
    options: GridOptions,
) -> list[GridRow]:
    """Give one row for each provider, in their order.

    Providers that can't serve, raise or give a wrong result have a row with the reason; the others
    are timed in turns.
    """
    load = make_workload(point, pool, options)
    rows = {p.name: _empty_row(point, p, options) for p in providers}
    able = list(_able(providers, rows, load))
    oracle = sampled_oracle(load.case) if able else None
    ready: dict[str, tuple[Checked, Pass]] = {}
    for provider in able:
        assert oracle is not None
        found = _prepare(provider, load, oracle, rows[provider.name], ceilings)
        if isinstance(found, GridRow):
            rows[provider.name] = found
        else:
            ready[provider.name] = found
    if ready:
        timed = time_rounds({name: each for name, (_, each) in ready.items()}, options.device)
        for name, (one, _) in ready.items():
            rows[name] = _figures(one, timed[name], load, options.device)
    return list(rows.values())


def failed_point(
    point: Point, providers: Sequence[Provider], options: GridOptions, error: Exception
) -> list[GridRow]:
    """Give the rows of a point that could not be measured at all: the next run passes it by."""
    text = f"the point failed: {_describe(error)}"
    return [_reason(_empty_row(point, p, options), FAILED, text) for p in providers]


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def device_is_lost(device: torch.device) -> bool:
    """Tell whether an error has taken the device down for this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _empty_row(point: Point, provider: Provider, options: GridOptions) -> GridRow:
    return GridRow(
        batch=point.batch,
        heads=point.heads,
        mask=point.mask,
        page_size=point.page_size,
        dtype=str(options.dtype).removeprefix("torch."),
        provider=provider.name,
    )


def _able(
    providers: Sequence[Provider], rows: dict[str, GridRow], load: Workload
) -> Iterator[Provider]:
    """Give the providers that say they can serve; the rows of the others get their reason."""
    need = requirements(load.case)
    for provider in providers:
        missing = provider.missing()
        problems = missing or provider.problems(need)
        if problems:
            status = ABSENT if missing else REFUSED
            rows[provider.name] = _reason(rows[provider.name], status, "; ".join(problems))
        else:
            yield provider


def _reason(row: GridRow, status: str, reason: str) -> GridRow:
    return dataclasses.replace(row, status=status, reason=reason)


def _prepare(
    provider: Provider, load: Workload, oracle: SampledOracle, row: GridRow, ceilings: Ceilings
) -> tuple[Checked, Pass] | GridRow:
    """Plan, check and capture; a row with its reason where that fails."""
    step = "it can't be planned or run"
    try:
        found = _check(provider, load, oracle, row)
        if found.row.reason is not None:
            return found.row
        row, step = found.row, "it can't be captured in a CUDA graph"
        calls = _calls(found, load, ceilings)
        return found, make_pass(calls, load.case.q_latent.device)
    except SpecMLAError as error:
        return _reason(row, REFUSED, str(error))
    except Exception as error:  # one provider's failure, of whatever kind, must not end the grid
        return _reason(row, FAILED, f"{step}: {_describe(error)}")


def _check(provider: Provider, load: Workload, oracle: SampledOracle, row: GridRow) -> Checked:
    case = load.case
    plan = provider.plan(case)
    got = provider.result(provider.run(case, case.latent_cache, plan), plan)
    error = oracle.relative_error(got)
    wrong, remark = oracle.verdict(got, checks_lse=provider.checks_lse)
    notes = [note for note in (provider.note(case), remark) if note]
    row = dataclasses.replace(
        row,
        rel_err=error if math.isfinite(error) else None,
        checked_requests=oracle.requests,
        note="; ".join(notes) or None,
    )
    if wrong is not None:
        row = _reason(row, WRONG, f"wrong result, not timed: {wrong}")
    return Checked(provider, plan, row)


def _calls(one: Checked, load: Workload, ceilings: Ceilings) -> list[Callable[[], object]]:
    """Give the calls of a pass: over all windows in turn, until it is long enough."""
    count = len(load.windows)
    if load.case.q_latent.device.type == "cuda":
        each_us = FIXED_US + ceilings.floor_us(*load.cost)
        count = max(count, math.ceil(PASS_US / each_us))
    windows = [load.windows[i % len(load.windows)] for i in range(count)]
    return [functools.partial(one.provider.run, load.case, cache, one.plan) for cache in windows]


def _figures(one: Checked, rounds: Rounds, load: Workload, device: torch.device) -> GridRow:
    us = rounds.timing.us
    call = functools.partial(one.provider.run, load.case, load.case.latent_cache, one.plan)
    return dataclasses.replace(
        one.row,
        us=us,
        us_p10=rounds.timing.us_p10,
        us_p90=rounds.timing.us_p90,
        gbps=load.cost.gbps(us),
        tflops=load.cost.tflops(us),
        calls=rounds.calls,
        rounds=rounds.passes,
        plan_us=_plan_us(one, load, device),
        host_us=_host_us(call, device),
    )


def _plan_us(one: Checked, load: Workload, device: torch.device) -> float:
    """Time the plan alone, the device awaited; a library that attends as well is set off."""
    plan = functools.partial(one.provider.schedule, load.case, one.plan)
    us = host_us(plan, device, reps=PLAN_REPS)
    if not one.provider.schedule_attends:
        return us
    call = functools.partial(one.provider.run, load.case, load.case.latent_cache, one.plan)
    return max(0.0, us - host_us(call, device, reps=PLAN_REPS))


def _host_us(call: Callable[[], object], device: torch.device) -> float | None:
    """Time until an eager call returns, the device not awaited."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    times = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize(device)
    return statistics.median(times)
