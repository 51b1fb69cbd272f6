"""Products of Triton's interpreter whose rows don't depend on their place."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def dots_by_row() -> Iterator[None]:
    """Let Triton's interpreter multiply row by row until the end of the block.

    On a GPU a row of `tl.dot` has the same bits wherever in the tile it stands. The interpreter
    calls a BLAS, which may round it differently in another place: OpenBLAS does on CPUs without
    AVX-512. What compares bits of batch-invariant kernels on a CPU needs this; compiled kernels
    are left as they are. It may be nested, but is not for several threads.
    """
    # The interpreter needs both; where one is missing nothing is interpreted.
    if not all(map(importlib.util.find_spec, ("triton", "numpy"))):
        yield
        return
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def handle(data: Any, like: Any) -> Any:
        return interpreter.TensorHandle(data, like.dtype)

    def by_row(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # [..., M, 1, K] by [..., 1, K, N]: a product for each row.
        row, whole = handle(a.data[..., None, :], a), handle(b.data[..., None, :, :], b)
        made = plain(self, row, whole, handle(d.data[..., None, :], d), *options)
        return handle(made.data[..., 0, :], made)

    builder.create_dot = by_row
    try:
        yield
    finally:
        builder.create_dot = plain
