"""Makes Triton believe in an sm_90 whose driver is `fake_cuda.c`, and reads its log."""

from __future__ import annotations

import ctypes
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import driver

from specmla.kernels.direct import DirectKernel

SIZES = {"i1": 1, "u1": 1, "i32": 4, "fp32": 4, "i64": 8, "u64": 8}


class FakeDriver(CudaDriver):  # type: ignore[misc]  # Triton is not typed
    """Device 0, compute capability 9.0, stream 77."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 77
        self.set_current_device = lambda device: None
        self.get_device_capability = lambda device: (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class FakeGpu:
    """The log of launches of this process; there is one."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._known: set[int] = set()
        driver.set_active(FakeDriver())

    def log(self) -> bytes:
        """Give what has been launched since the last call: settings and every parameter's bytes."""
        buffer = ctypes.create_string_buffer(1 << 20)
        return buffer.raw[: self._library.fake_log(buffer)]

    def watch(self, kernel: DirectKernel) -> None:
        """Write down the parameters of a kernel's compiled forms from here on."""
        for cache in kernel.kernel.device_caches.values():
            for compiled in cache[0].values():
                if compiled.function in self._known:
                    continue
                self._known.add(compiled.function)
                sizes = [n for kind in compiled.src.signature.values() for n in _sizes(kind)]
                sizes += [8, 8]  # two kinds of scratch
                given = (ctypes.c_int * len(sizes))(*sizes)
                function = ctypes.c_ulonglong(compiled.function)
                self._library.fake_sizes(function, len(sizes), given)


def _sizes(kind: Any) -> list[int]:
    """Count the bytes of a parameter; a descriptor is a map, a shape and strides."""
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):
        rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
        return [128, *[4] * rank, *[8] * rank]
    return [8 if kind.startswith("*") else SIZES[kind]]
