"""The Gluon names that changed between Triton 3.6 and 3.9, under one name each."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_HAS_BARRIER = hasattr(gl, "barrier")

tma_load: Any = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""`(descriptor, coordinates, barrier, shared)`: start a bulk copy that completes on `barrier`."""

barrier: Any = gl.barrier if _HAS_BARRIER else gl.thread_barrier
"""Wait for the other threads of this partition."""

HAS_REINTERPRET: Any = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

arrive: Any = mbarrier.arrive
expect: Any = mbarrier.expect
wait: Any = mbarrier.wait
init: Any = mbarrier.init
MBarrierLayout: Any = mbarrier.MBarrierLayout


@gluon.jit
def view(shared, shape: gl.constexpr, layout: gl.constexpr):
    """Look at shared memory of 16-bit elements in another shape and layout."""
    if HAS_REINTERPRET:
        return shared.reinterpret(shared.dtype, shape, layout)
    else:
        return shared._reinterpret(shared.dtype, shape, layout)
