"""The C function by which Triton starts a compiled kernel, and what it is called with.

Both are Triton's own business and change between versions: those known here are checked for by
name and shape, and every other one is used by its public way alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

MAPS = 1024
"""Tensor maps a kernel keeps, of 128 bytes each: layers of the models served at once."""

_CALL = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
_CALL_TAIL = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"]

Call = Callable[[tuple[int, ...], int, list[Any]], None]
"""Calls the C function: grid of three axes, stream, all arguments as it wants them."""


class RawStart:
    """Starts one form of a kernel.

    Args:
        call: into C.
        maps: places of `BoxedTensor`s among the arguments, and what makes a map of address, shape
            and strides.
        num_constexprs: constexprs after the arguments; C wants something in their place.
    """

    def __init__(
        self, call: Call, maps: list[tuple[int, Callable[..., Any]]], num_constexprs: int
    ) -> None:
        self.call, self.maps = call, maps
        self.tail = [None] * num_constexprs

    def launch(self, grid: tuple[int, ...], stream: int, args: list[Any]) -> None:
        """Start on a stream; `args` have addresses in place of tensors."""
        given = args + self.tail
        # From the last one on: what a map expands to moves the places after it.
        for i, make_map in reversed(self.maps):
            tensor = given[i].tensor
            shape, strides = tensor.shape, tensor.stride()
            given[i : i + 1] = make_map(tensor.data_ptr(), shape, strides), *shape, *strides
        self.call((*grid, 1, 1)[:3], stream, given)


@lru_cache(maxsize=1)
def launcher_problems() -> tuple[str, ...]:
    """Say why Triton's C launcher can't be called here; empty if it can. Found out once."""
    if torch.version.hip is not None:
        return ("torch is built for ROCm, known is the launcher for CUDA",)
    try:
        import triton
        from triton.backends.nvidia import driver
    except ImportError as error:
        return (f"triton's CUDA driver can't be imported: {error}",)
    if not hasattr(triton, "JITFunction"):
        return ("triton has no JITFunction",)
    call = list(inspect.signature(driver.CudaLauncher.__call__).parameters)
    if triton.__version__.startswith("3.6."):
        found = call == [*_CALL, "args"] and hasattr(driver, "make_launcher")
        found = found and getattr(driver, "_BASE_ARGS_FORMAT", "") == "iiiKKppOOOOOO"
    elif triton.__version__.startswith("3.9."):
        found = call == _CALL + _CALL_TAIL
        found = found and all(
            map(driver.__dict__.get, ("annotate_arguments", "make_kernel_signature"))
        )
    else:
        return (f"triton is {triton.__version__}, known are the launchers of 3.6 and 3.9",)
    return () if found else (f"the launcher of triton {triton.__version__} is not the known one",)


def find_start(kernel: Any, boxes: Sequence[int], num_constexprs: int) -> RawStart | None:
    """Give what starts a loaded kernel, or None if only Triton can start it.

    Args:
        kernel: a `CompiledKernel` that has run on the current device.
        boxes: places of `BoxedTensor`s among its arguments.
        num_constexprs: constexprs after its arguments.
    """
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    if launcher_problems() or type(kernel) is not CompiledKernel:
        return None
    launcher = kernel.run
    metas = getattr(kernel.metadata, "tensordesc_meta", None) or []
    if (
        type(launcher) is not CudaLauncher
        or launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
        or len(metas) != len(boxes)
        or any(meta is None or meta["fp4_padded"] or meta.get("is_im2col") for meta in metas)
    ):
        return None
    call = _call_of(kernel, launcher)
    if call is None:
        return None
    maps = [(i, _map_maker(meta)) for i, meta in zip(boxes, metas, strict=True)]
    return RawStart(call, maps, num_constexprs)


def _call_of(kernel: Any, launcher: Any) -> Call | None:
    """Give the launcher's C function with all that is the same in every call."""
    import triton

    function, packed = kernel.function, kernel.packed_metadata
    cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl
    raw = _unwrapped(launcher.launch)
    if not inspect.isbuiltin(raw):
        return None
    if triton.__version__.startswith("3.6."):
        # Scratch (two), metadata of the kernel and of the launch, hooks.
        fixed = (function, cooperative, pdl, None, None, packed, None, None, None)

        def call(grid: tuple[int, ...], stream: int, args: list[Any]) -> None:
            raw(*grid, stream, *fixed, *args)

        return call
    # Metadata of the kernel and of the launch, hooks, scratch (two).
    given = (launcher.arg_annotations, launcher.kernel_signature)
    fixed_39 = (function, cooperative, pdl, packed, None, None, None, None, None, *given)

    def call_39(grid: tuple[int, ...], stream: int, args: list[Any]) -> None:
        raw(*grid, stream, *fixed_39, args)

    return call_39


def _unwrapped(launch: Any) -> Any:
    """Give the C function inside the closure that encodes tensor maps, or the function itself."""
    if not inspect.isfunction(launch):
        return launch
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
    return cells["launcher"].cell_contents if "launcher" in cells else None


def _map_maker(meta: dict[str, Any]) -> Callable[..., Any]:
    """Give a function of address, shape and strides that encodes a map, or finds it again.

    A map is these numbers, so it holds for whatever memory has the address when it is used.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    fixed = (meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]])

    @lru_cache(maxsize=MAPS)
    def make_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return fill(address, *fixed, meta["block_size"], list(shape), list(strides), 0)

    return make_map
