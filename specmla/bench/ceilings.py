"""What the device can do at all: a large copy and a large matrix product."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

GPU_SIZES = (1 << 31, 8192)
CPU_SIZES = (1 << 24, 256)
"""Bytes of the copied buffer, and side of the square matrices."""
WARM_UP_S = 0.3
REPEATS = 8


class Ceilings(NamedTuple):
    """copy_gbps: bytes read and written per time, GB/s. gemm_tflops: of a square product."""

    copy_gbps: float
    gemm_tflops: float

    def floor_us(self, cache_bytes: int, flops: int) -> float:
        """Give the time in microseconds that no call with this work can beat."""
        return max(cache_bytes / self.copy_gbps / 1e3, flops / self.gemm_tflops / 1e6)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure both, random data, medians; gives the fields of `Ceilings` and the sizes."""
    num_bytes, side = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.empty(side, side, dtype=dtype, device=device).normal_(generator=generator)
        for _ in range(2)
    )
    product = torch.empty_like(a)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_(generator=generator)
    target = torch.empty_like(source)
    gemm_s = _median_s(lambda: torch.matmul(a, b, out=product), device)
    copy_s = _median_s(lambda: target.copy_(source), device)
    return {
        "copy_gbps": 2 * num_bytes / copy_s / 1e9,
        "gemm_tflops": 2 * side**3 / gemm_s / 1e12,
        "copy_bytes": num_bytes,
        "gemm": f"{side}^3 {str(dtype).removeprefix('torch.')}",
    }


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return statistics.median(_wall_s(call) for _ in range(REPEATS))
    with torch.cuda.device(device):
        start = time.perf_counter()
        while time.perf_counter() - start < WARM_UP_S:
            call()
            torch.cuda.synchronize(device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        call()  # the host queues the next ones meanwhile
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize(device)
        times: list[float] = [
            before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)
        ]
        return statistics.median(times)


def _wall_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
