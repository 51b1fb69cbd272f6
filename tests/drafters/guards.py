"""Guards around captured calls: on a CPU too, nothing may be read back from the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import specmla
from specmla.verify import captured, captured_overlap, draft_graphs

PACKAGE = Path(specmla.__file__).parent
ROOTS = [PACKAGE]
"""Whose files are looked at; an environment may lie beside the package."""
CPU_ONLY = (
    "specmla/cache/latent.py",
    "specmla/cache/rows.py",
    "specmla/backends/gather.py",
    "specmla/verify/sampling.py",
    "specmla/verify/rules/residual.py",
)
"""Where the CPU's own code looks at values, and that for a GPU does not."""
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


def is_ours(path: Path) -> bool:
    return any(path.is_relative_to(root) for root in ROOTS)


def caller() -> str:
    frame = sys._getframe()
    while (name := frame.f_code.co_filename) == __file__ or not is_ours(Path(name)):
        frame = frame.f_back
    return str(Path(name).relative_to(PACKAGE.parent))


class NoReads(TorchFunctionMode):
    """Refuses methods that bring a tensor's values to the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READS and func in map(READERS.get, READS):
            assert caller() in CPU_ONLY, f"{func.__name__} in {caller()}"
        return func(*args, **(kwargs or {}))


READERS = {name: getattr(torch.Tensor, name) for name in READS}


SCALARS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class NoScalars(TorchDispatchMode):
    """Refuses operators whose result depends on values that the host must know."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        masks = args[1] if name in INDEXING else ()
        by_mask = any(i is not None and i.dtype == torch.bool for i in masks)
        if name in SCALARS or by_mask:
            assert caller() in CPU_ONLY, f"{name} in {caller()}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def guarded(monkeypatch):
    """Let every captured call run under both guards; gives the list of calls."""
    return guard_records(monkeypatch)


def guard_records(monkeypatch) -> list:
    """Do so in drafts, steps and overlapped steps."""
    calls = []

    def guard(call, device, pool=None):
        def run():
            calls.append(call)
            with NoScalars(), NoReads():
                return call()

        return run

    for module in (draft_graphs, captured, captured_overlap):
        monkeypatch.setattr(module, "record", guard)
    return calls
