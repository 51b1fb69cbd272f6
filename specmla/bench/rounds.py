"""Times several providers on one case in turns, so that all meet the same clocks and heat.

A round runs every provider once. On a GPU one pass of a provider is the replay of its CUDA graph
between two events; the graph runs the call over windows of the pool in turn, see `timing`. Rounds
end when every median stands, or when there were enough.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from specmla.bench.timing import Timing, capture, summary

LEAST_ROUNDS = 5
MOST_ROUNDS = 20
STEADY = 0.01
"""Spread (quartiles) of the passes over their median at which a median stands."""
SPACER_BYTES = 1 << 30


class Pass(NamedTuple):
    """launch: runs `calls` calls; on a GPU, queues them."""

    launch: Callable[[], object]
    calls: int


class Rounds(NamedTuple):
    """timing: of one call. passes: timed ones. calls: in each pass."""

    timing: Timing
    passes: int
    calls: int


def make_pass(calls: Sequence[Callable[[], object]], device: torch.device) -> Pass:
    """Prepare a pass over `calls`: a captured graph on a GPU, after a warm-up.

    Raises:
        RuntimeError: the calls can't be captured.
    """
    if device.type != "cuda":
        return Pass(lambda: [call() for call in calls], len(calls))
    with torch.cuda.device(device):
        graph = capture(calls)
    return Pass(graph.replay, len(calls))


def time_rounds(
    passes: Mapping[str, Pass],
    device: torch.device,
    *,
    least: int = LEAST_ROUNDS,
    most: int = MOST_ROUNDS,
) -> dict[str, Rounds]:
    """Run rounds until all medians stand, at least `least` and at most `most` of them."""
    run = _gpu_round if device.type == "cuda" else _cpu_round
    run(passes, device)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for count in range(1, most + 1):
        for name, us in run(passes, device).items():
            times[name].append(us)
        if count >= least and all(map(_stands, times.values())):
            break
    return {
        name: Rounds(summary(times[name]), len(times[name]), passes[name].calls) for name in passes
    }


def _stands(times: list[float]) -> bool:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low <= STEADY * middle


def _cpu_round(passes: Mapping[str, Pass], device: torch.device) -> dict[str, float]:
    found = {}
    for name, one in passes.items():
        start = time.perf_counter()
        one.launch()
        found[name] = 1e6 * (time.perf_counter() - start) / one.calls
    return found


def _gpu_round(passes: Mapping[str, Pass], device: torch.device) -> dict[str, float]:
    with torch.cuda.device(device):
        spacer = torch.empty(SPACER_BYTES, dtype=torch.uint8, device=device)
        marks = {name: [torch.cuda.Event(enable_timing=True) for _ in "ab"] for name in passes}
        spacer.zero_()  # keeps the device busy until the host has queued the first graph
        for name, one in passes.items():
            marks[name][0].record()
            one.launch()
            marks[name][1].record()
        torch.cuda.synchronize(device)
    return {
        name: 1e3 * before.elapsed_time(after) / passes[name].calls
        for name, (before, after) in marks.items()
    }
