"""Reused CPU memory for the large intermediates of the reference backend."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class CpuScratch(threading.local):
    """One growing buffer a dtype and thread.

    A fresh megabyte from the C allocator is mapped, faulted in page by page and unmapped on every
    call, which takes longer than the attention itself at demo sizes. Each thread has its own
    buffers, so one backend may serve several. A buffer grows to the next power of two and is kept.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._views: dict[torch.dtype, Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Give uninitialised memory, valid until the next call for that dtype in this thread."""
        view = self._views.get(dtype)
        if view is not None and view.shape == shape:  # the layers of a step ask for the same
            return view
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < count:
            # An inference tensor could not be written to outside of inference mode later.
            with torch.inference_mode(False):
                buffer = torch.empty(1 << (count - 1).bit_length(), dtype=dtype)
            self._buffers[dtype] = buffer
        self._views[dtype] = view = buffer[:count].view(shape)
        return view
