from __future__ import annotations

import time

import pytest
import torch

from specmla.bench.timing import COLD_FACTOR, host_us, method, num_copies, time_calls

CPU = torch.device("cpu")


def test_cpu_time_is_that_of_one_call() -> None:
    calls = [lambda: time.sleep(2e-3), lambda: time.sleep(6e-3)]
    timing = time_calls(calls, CPU, reps=5)
    assert timing.us == pytest.approx(4000, rel=0.5)
    assert timing.us_p10 <= timing.us <= timing.us_p90


def test_cpu_runs_each_call_once_a_repetition_after_a_warm_up() -> None:
    count = [0, 0]

    def call(i: int) -> None:
        count[i] += 1

    time_calls([lambda: call(0), lambda: call(1)], CPU, reps=7)
    assert count == [8, 8]


def test_host_time_leaves_the_first_call_out() -> None:
    delays = iter([0.05, 1e-3, 1e-3, 1e-3])
    assert host_us(lambda: time.sleep(next(delays)), CPU, reps=3) < 40_000


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
    timing = time_calls([lambda x=x: x.sum() for x in data], device, reps=20)
    assert 2**28 / 10e12 < timing.us * 1e-6 < 2**28 / 0.1e12
