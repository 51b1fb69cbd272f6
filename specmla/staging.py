"""Sends a step's small integer arrays to the device in a single copy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor to the device without waiting for it: from the CPU to CUDA through a pinned
    copy, since one from pageable memory would wait for all work queued before it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def send_arrays(arrays: Mapping[str, array[int]], device: torch.device) -> dict[str, Tensor]:
    """Copy named host arrays (typecodes 'q' or 'i') to the device; every result is a 1-d view.

    On CUDA the one copy is pinned and non-blocking: nothing waits for the device. int64 arrays come
    first in the buffer, so that every view is aligned.
    """
    longs = {name: values for name, values in arrays.items() if values.typecode == "q"}
    ints = {name: values for name, values in arrays.items() if values.typecode == "i"}
    long_sizes, int_sizes = (list(map(len, part.values())) for part in (longs, ints))
    num_longs, num_ints = sum(long_sizes), sum(int_sizes)
    if num_ints % 2:  # the buffer is one of int64
        int_sizes.append(1)
    padding = bytes(4 * (num_ints % 2))
    parts: list[array[int] | bytes] = [*longs.values(), *ints.values(), padding]
    raw = bytearray().join(parts)
    host = torch.frombuffer(raw, dtype=torch.int64) if raw else torch.empty(0, dtype=torch.int64)
    # One split a dtype: a slice and a view of every array would take longer than the copy.
    *views, rest = send(host, device).split_with_sizes([*long_sizes, len(host) - num_longs])
    int_views = rest.view(torch.int32).split_with_sizes(int_sizes) if ints else ()
    return dict(zip((*longs, *ints), (*views, *int_views), strict=False))
