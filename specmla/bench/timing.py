"""Times a call over many copies of its data, so that the cache it reads is never in L2.

On a GPU one CUDA graph runs the call once for each copy, in turn, as a model does with the caches
of its layers. Between two uses of a copy all others pass through L2, and together they are several
times its size: every call starts cold, without a flush to subtract. Replays hold no host launches;
the gap between two replays is shared by the calls of one. On a CPU calls are timed as they are.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# The copies together are at least this many times L2.
COLD_FACTOR = 5
# A graph holds at least this many calls, so that the gap between replays weighs little.
MIN_CALLS = 8
MAX_COPIES = 512
WARM_UP_S = 0.2
# Repetitions of a call that is too slow for all that were asked for.
LEAST_REPS = 5


class Timing(NamedTuple):
    """Microseconds of one call: median over repetitions, with the 10th and 90th percentile."""

    us: float
    us_p10: float
    us_p90: float


def num_copies(bytes_each: int, device: torch.device, factor: int = COLD_FACTOR) -> int:
    """Copies of `bytes_each` bytes, `factor` times L2 in all, that keep it cold; one on a CPU."""
    if device.type != "cuda":
        return 1
    target = factor * torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(2, -(-target // max(bytes_each, 1))), MAX_COPIES)


def method(device: torch.device, factor: int = COLD_FACTOR) -> str:
    """Describe how `time_calls` measures, for the report."""
    if device.type != "cuda":
        return "eager wall time on the CPU, median"
    return (
        "CUDA-graph replay between events, cold L2 (calls rotate over copies of the cache of "
        f">= {factor} x L2 in all, at most {MAX_COPIES}), median"
    )


def time_calls(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    reps: int,
    limit_s: float = math.inf,
) -> Timing:
    """Time the mean call of a pass over `calls`, `reps` times.

    Args:
        calls: the same work on different copies of the data.
        device: where they run.
        reps: passes that are timed, after a warm-up.
        limit_s: fewer passes are timed if all would take longer, but `LEAST_REPS` at least.
    """
    if device.type != "cuda":
        return summary(_wall_times(calls, reps, limit_s))
    with torch.cuda.device(device):
        many = [*calls] * -(-MIN_CALLS // len(calls))
        return summary(_replay_times(capture(many), reps, len(many), limit_s))


def host_us(call: Callable[[], object], device: torch.device, *, reps: int) -> float:
    """Median wall time of `call` in microseconds, its device work awaited."""
    call()
    times = []
    for _ in range(reps):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wall_times(calls: Sequence[Callable[[], object]], reps: int, limit_s: float) -> list[float]:
    for call in calls:
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < reps:
        start = time.perf_counter()
        if len(times) >= LEAST_REPS and start - begin > limit_s:
            break
        for call in calls:
            call()
        times.append(1e6 * (time.perf_counter() - start) / len(calls))
    return times


def _warm_up(calls: Sequence[Callable[[], object]]) -> None:
    # Kernels are compiled and loaded here: a capture allows neither.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Run a few of `calls`, then capture all of them in one graph on the current device.

    Raises:
        RuntimeError: they can't be captured.
    """
    _warm_up(calls[:3])
    return _graph_of(calls)


def _graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_times(
    graph: torch.cuda.CUDAGraph, reps: int, calls: int, limit_s: float
) -> list[float]:
    # By time, not by count: clocks rise with load.
    start, replays = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < WARM_UP_S:
        graph.replay()
        torch.cuda.synchronize()
        replays += 1
    if reps * took / replays > limit_s:
        reps = min(reps, max(LEAST_REPS, int(limit_s * replays / took)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(reps + 1)]
    # All replays are queued before the first is awaited: the device never waits for the host.
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * before.elapsed_time(after) / calls for before, after in itertools.pairwise(marks)]


def summary(times: Sequence[float]) -> Timing:
    """Give the median and both outer tenths of some times."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return Timing(
        us=statistics.median(ordered),
        us_p10=ordered[round(0.1 * last)],
        us_p90=ordered[round(0.9 * last)],
    )
