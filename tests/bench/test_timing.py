from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from specmla.bench import timing
from specmla.bench.timing import COLD_FACTOR, host_us, method, num_copies, time_calls

CPU = torch.device("cpu")


class Clock:
    """A clock that moves only when a call says so: no test waits, none depends on the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, *us: float) -> Callable[[], None]:
        """Give a call that takes the given microseconds in turn, the last ones for ever."""
        durations = itertools.chain(us, itertools.repeat(us[-1]))

        def call() -> None:
            self.now += 1e-6 * next(durations)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_cpu_time_is_that_of_one_call(clock: Clock) -> None:
    got = time_calls([clock.takes(2000.0), clock.takes(6000.0)], CPU, reps=5)
    assert got == pytest.approx((4000.0, 4000.0, 4000.0))


def test_median_and_spread(clock: Clock) -> None:
    """The first call is the warm-up; then 11 repetitions, two of them outliers."""
    got = time_calls([clock.takes(999.0, 1.0, 900.0, *range(10, 19))], CPU, reps=11)
    assert got == pytest.approx((14.0, 10.0, 18.0))


def test_cpu_runs_each_call_once_a_repetition_after_a_warm_up() -> None:
    count = [0, 0]

    def call(i: int) -> None:
        count[i] += 1

    time_calls([lambda: call(0), lambda: call(1)], CPU, reps=7)
    assert count == [8, 8]


def test_slow_calls_are_timed_fewer_times(clock: Clock) -> None:
    """The warm-up does not count; what fits is timed, and five passes at least."""
    counts = []
    for limit_s in (1.0, 0.0071, 0.0):
        calls = [0]

        def call(calls: list[int] = calls) -> None:
            calls[0] += 1
            clock.now += 1e-3

        time_calls([call], CPU, reps=50, limit_s=limit_s)
        counts.append(calls[0] - 1)
    assert counts == [50, 8, 5]


def test_host_time_leaves_the_first_call_out(clock: Clock) -> None:
    assert host_us(clock.takes(50_000.0, 3.0, 1.0, 2.0), CPU, reps=3) == pytest.approx(2.0)


def test_one_copy_on_a_cpu() -> None:
    assert num_copies(10, CPU) == 1
    assert "CPU" in method(CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("bytes_each", [10, 10**6, 10**9])
def test_copies_exceed_l2(bytes_each: int) -> None:
    device = torch.device("cuda")
    copies = num_copies(bytes_each, device)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    assert 2 <= copies <= 512
    assert copies == 512 or copies * bytes_each >= COLD_FACTOR * l2_bytes


@pytest.mark.gpu
def test_gpu_time_follows_the_bytes_moved() -> None:
    """A cold read can't beat the memory: 256 MiB take longer than at 10 TB/s, shorter than 0.1."""
    device = torch.device("cuda")
    data = [torch.ones(2**26, device=device) for _ in range(3)]
    got = time_calls([lambda x=x: x.sum() for x in data], device, reps=20)
    assert 2**28 / 10e12 < got.us * 1e-6 < 2**28 / 0.1e12
