"""What memory and which implementation a latent cache accepts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.names import REFUSED_ROW_BYTES
from specmla.cache.formats.plain import quantised
from specmla.cache.layout import format_problems, layout_problems
from specmla.cache.operations import KERNEL_FORMATS

Impl = Literal["triton", "torch"]


def default_impl(device: torch.device) -> Impl:
    """Name the implementation that `impl=None` stands for."""
    return "triton" if device.type == "cuda" else "torch"


def impl_problems(
    impl: str | None, device: torch.device, format: CacheFormat | None = None
) -> list[str]:
    """List why `impl` can't serve `device` and the row format."""
    if impl not in (None, "triton", "torch"):
        return [f"impl is {impl!r}, accepted are 'triton', 'torch' and None"]
    if (impl or default_impl(device)) == "torch":
        return []
    if importlib.util.find_spec("triton") is None:
        return ["impl is 'triton', but triton is not installed; accepted is 'torch'"]
    from specmla.kernels.store import runs_on

    found = []
    if not runs_on(device):
        found.append(
            f"impl is 'triton' on {device}, accepted are CUDA devices (or Triton's interpreter)"
        )
    packed = quantised(format)
    if packed is not None and packed.name not in KERNEL_FORMATS:
        found.append(
            f"format is {packed.name!r}, accepted by impl 'triton' are {list(KERNEL_FORMATS)}; "
            "impl 'torch' takes all"
        )
    elif packed is not None and packed.dtype == torch.float64:
        found.append("dtype is torch.float64, accepted by impl 'triton' in a format is float32")
    return found


def pool_bytes(views: Sequence[Tensor], format: CacheFormat | None) -> list[Tensor]:
    """Reinterpret e4m3 views as the bytes that "fp8" works on; others stay as they are."""
    if format is None or format.name != "fp8":
        return list(views)
    return [view.view(torch.uint8) if view.dtype == torch.float8_e4m3fn else view for view in views]


def pool_problems(views: Sequence[Tensor], format: CacheFormat | None = None) -> list[str]:
    """List everything that keeps an engine's views from being one cache."""
    if not views:
        return ["views is empty, accepted is one view a layer"]
    first, found = views[0], []
    if first.dim() != 3 or 0 in first.shape:
        return [f"views[0] has shape {tuple(first.shape)}, accepted is [N, G, A], none of them 0"]
    _, page_size, width = first.shape
    packed = quantised(format)
    if packed is None:
        found += layout_problems(width, first.dtype, page_size)
        found += format_problems(format, width, first.dtype)
    else:
        found += _byte_problems(views, packed)
    if first.stride(2) != 1 or (page_size > 1 and first.stride(1) != width):
        found.append(
            f"views[0] has strides {first.stride()}, accepted are rows of {width} without gaps"
        )
    if first.shape[0] > 1 and first.stride(0) < page_size * width:
        found.append(
            f"views[0] has a page stride of {first.stride(0)}, accepted is >= {page_size * width}"
        )
    for i, view in enumerate(views[1:], 1):
        for name in ("shape", "dtype", "device"):
            if getattr(view, name) != getattr(first, name):
                found.append(f"views[{i}] and views[0] differ in {name}, must agree")
        if view.dim() == 3 and view.stride() != first.stride():
            found.append(f"views[{i}] and views[0] differ in strides, must agree")
        if (view.data_ptr() - first.data_ptr()) % first.element_size():
            found.append(f"views[{i}] is not a whole number of elements away from views[0]")
    if len({view.data_ptr() for view in views}) < len(views):
        found.append("two views start at the same address, accepted is memory of its own per layer")
    return found


def _byte_problems(views: Sequence[Tensor], format: CacheFormat) -> list[str]:
    """List why views can't hold rows of a quantised format."""
    first, found = views[0], []
    if first.dtype != torch.uint8:
        found.append(f"dtype is {first.dtype}, accepted is torch.uint8 for {format.name!r}")
    if first.shape[2] != format.bytes_per_row:
        known = REFUSED_ROW_BYTES.get(first.shape[2])
        found.append(
            f"rows have {first.shape[2]} bytes, accepted are {format.bytes_per_row} for "
            f"{format.name!r}" + (f" ({known})" if known else "")
        )
    places = [view.data_ptr() for view in views] + [first.stride(0), first.stride(1)]
    if any(place % format.alignment for place in places):
        found.append(
            f"addresses or strides are no multiples of {format.alignment} bytes, which "
            f"{format.name!r} needs"
        )
    return found
