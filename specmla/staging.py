"""Sends a step's small integer arrays to the device in a single copy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import torch
from torch import Tensor

_DTYPES = {"q": torch.int64, "i": torch.int32}


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
    ordered = sorted(arrays.items(), key=lambda item: item[1].typecode != "q")
    raw = bytearray().join([values.tobytes() for _, values in ordered])
    host = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    host = send(host, device)
    sent, at = {}, 0
    for name, values in ordered:
        size = len(values) * values.itemsize
        sent[name] = host[at : at + size].view(_DTYPES[values.typecode])
        at += size
    return sent
