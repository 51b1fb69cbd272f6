"""What memory and which implementation a latent cache accepts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from specmla.cache.layout import layout_problems

Impl = Literal["triton", "torch"]


def default_impl(device: torch.device) -> Impl:
    """Name the implementation that `impl=None` stands for."""
    return "triton" if device.type == "cuda" else "torch"


def impl_problems(impl: str | None, device: torch.device) -> list[str]:
    """List why `impl` can't serve `device`."""
    if impl not in (None, "triton", "torch"):
        return [f"impl is {impl!r}, accepted are 'triton', 'torch' and None"]
    if (impl or default_impl(device)) == "torch":
        return []
    if importlib.util.find_spec("triton") is None:
        return ["impl is 'triton', but triton is not installed; accepted is 'torch'"]
    from specmla.kernels.store import runs_on

    if not runs_on(device):
        return [
            f"impl is 'triton' on {device}, accepted are CUDA devices (or Triton's interpreter)"
        ]
    return []


def pool_problems(views: Sequence[Tensor]) -> list[str]:
    """List everything that keeps an engine's views from being one cache."""
    if not views:
        return ["views is empty, accepted is one view a layer"]
    first, found = views[0], []
    if first.dim() != 3 or 0 in first.shape:
        return [f"views[0] has shape {tuple(first.shape)}, accepted is [N, G, A], none of them 0"]
    _, page_size, width = first.shape
    found += layout_problems(width, first.dtype, page_size)
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
