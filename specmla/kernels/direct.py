"""Launches a kernel that has run before without Triton's Python, which takes longer than the GPU.

The first call of a form goes through Triton, which compiles and loads; later ones look it up by a
key of our own (`specialise`) and call the C launcher (`raw_launcher`). Where that is not possible,
every call goes through Triton: the machine code, and so every bit, is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from triton import JITFunction, knobs
from triton.runtime import driver

from specmla.kernels.raw_launcher import RawStart, find_start, launcher_problems
from specmla.kernels.specialise import ArgumentPattern, KernelSignature
from specmla.kernels.tensor_box import BoxedTensor


class _Calls(NamedTuple):
    """Calls with arguments of the same types, constexprs and options, on one device."""

    pattern: ArgumentPattern
    starts: dict[Hashable, RawStart | None]


class Started(NamedTuple):
    """How a call is started directly, and its arguments with addresses in place of tensors."""

    start: RawStart
    args: list[Any]


class DirectKernel:
    """A jitted kernel that starts at once from the second call of a form on.

    A launch or pre-run hook, set at any time, is honoured: calls go through Triton while there is
    one. What Triton checks at each call is not checked again: that globals which the kernel read
    still have the values with which it was compiled.

    Args:
        kernel: what `triton.jit` or `gluon.jit` gave, the interpreter's included.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        is_jitted = isinstance(kernel, JITFunction) and not launcher_problems()
        self._signature = KernelSignature(kernel) if is_jitted else None
        self._calls: dict[Hashable, _Calls | None] = {}

    @property
    def is_free(self) -> bool:
        """Whether it may start without Triton now: nobody watches launches or compilations."""
        return self._signature is not None and not is_watched(self.kernel)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> Started | None:
        """Start the kernel on the current stream of the current device.

        Args:
            grid: programs along one to three axes.
            args: for its parameters in order, constexprs excepted: tensors, `BoxedTensor`s,
                numbers, None.
            named: all constexprs by name, and Triton's launch options.

        Returns:
            What was started; None if the call went through Triton.
        """
        calls = self._calls_like(args, named) if self.is_free else None
        if calls is None:
            self._run(grid, args, named)
            return None
        form, flat = calls.pattern.read(args)
        start = calls.starts.get(form)
        if start is not None:
            start.launch(grid, current_stream(), flat)
            return Started(start, flat)
        compiled = self._run(grid, args, named)
        if form not in calls.starts and self._signature is not None:
            tail = len(self._signature.constexprs)
            calls.starts[form] = find_start(compiled, calls.pattern.boxes, tail)
        return None

    def find(self, args: Sequence[Any], named: Mapping[str, Any]) -> Started | None:
        """Give how a call that was launched before starts; None if only through Triton."""
        calls = self._calls_like(args, named) if self.is_free else None
        if calls is None:
            return None
        form, flat = calls.pattern.read(args)
        start = calls.starts.get(form)
        return None if start is None else Started(start, flat)

    def _calls_like(self, args: Sequence[Any], named: Mapping[str, Any]) -> _Calls | None:
        kinds, device = tuple(map(type, args)), driver.active.get_current_device()
        key = (device, _compile_knobs(), kinds, tuple(named.items()))
        if key not in self._calls and self._signature is not None:
            pattern = self._signature.pattern(kinds)
            known = pattern is not None and self._signature.names_constexprs(named)
            self._calls[key] = _Calls(pattern, {}) if pattern is not None and known else None
        return self._calls[key]

    def _run(self, grid: tuple[int, ...], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Launch through Triton; give the compiled kernel."""
        plain = [a.descriptor() if type(a) is BoxedTensor else a for a in args]
        return self.kernel[grid](*plain, **named)


def current_stream() -> int:
    """Give the current stream of the current device, as Triton finds it."""
    active = driver.active
    return int(active.get_current_stream(active.get_current_device()))


def is_watched(*kernels: Any) -> bool:
    """Tell whether someone wants to know of launches, or has a say in what is compiled."""
    runtime = knobs.runtime
    return bool(
        any(kernel.pre_run_hooks for kernel in kernels)
        or _calls_something(runtime.launch_enter_hook)
        or _calls_something(runtime.launch_exit_hook)
        or runtime.add_stages_inspection_hook is not None
    )


def _calls_something(hook: Any) -> bool:
    return hook is not None and (type(hook) is not knobs.HookChain or bool(hook.calls))


def _compile_knobs() -> tuple[Any, ...]:
    """Give the settings that Triton adds to the options of every launch."""
    compilation = knobs.compilation
    return (
        knobs.runtime.debug,
        compilation.instrumentation_mode,
        getattr(compilation, "fpsan_homomorphic_casts", False),
    )
