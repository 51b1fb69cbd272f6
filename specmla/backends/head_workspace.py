"""Memory for queries padded to a fixed number of heads, used by one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specmla.errors import BusyError, require
from specmla.query import pad_heads


class HeadWorkspace:
    """Grows to the largest query that it has held, by name, and is used again by every call.

    A call overwrites what the one before it left there. On a GPU that is right as long as all calls
    run on one stream; calls that may run at the same time need a workspace each. A second call on
    the host while the first holds it raises; two streams can't be told apart here.
    """

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._held: dict[str, Tensor] = {}
        self._is_final = False

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return sum(held.untyped_storage().nbytes() for held in self._held.values())

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the workspace.

        Raises:
            BusyError: another call holds it.
        """
        if not self._busy.acquire(blocking=False):
            raise BusyError(
                "the workspace of padded queries is in use by another call; calls at the same time "
                "need a FixedHeads each"
            )
        try:
            yield
        finally:
            self._busy.release()

    def reserve(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Grow `name` to `size` elements; made anew for another dtype or device.

        Raises:
            ArgumentError: growth after `finalise`.
        """
        held = self._held.get(name)
        fits = held is not None and (held.dtype, held.device) == (dtype, device)
        if held is not None and fits and size * dtype.itemsize <= held.untyped_storage().nbytes():
            return
        reason = (
            f"{name} takes {size} elements of {dtype} on {device}, accepted is what was reserved"
        )
        require([reason] if self._is_final else [], "HeadWorkspace")
        # An inference tensor could not be written to outside of inference mode later.
        with torch.inference_mode(False):
            self._held[name] = torch.empty(size, dtype=dtype, device=device)

    def finalise(self) -> None:
        """Let no call grow it any more, so that captured addresses stay valid."""
        self._is_final = True

    def padded(self, name: str, query: Tensor, num_heads: int) -> Tensor:
        """Copy a query [T, H, D] to `name` and view it as [T, num_heads, D].

        The surplus heads of a row are those of the next one, and undefined in the last.

        Raises:
            ArgumentError: it would have to grow after `finalise`.
        """
        rows, heads, width = query.shape
        size = (rows * heads + num_heads - heads) * width
        self.reserve(name, size, query.dtype, query.device)
        real = pad_heads(query.detach(), num_heads, self._held[name])
        return real.as_strided((rows, num_heads, width), (heads * width, width, 1))
