"""What a chunked prompt takes does not grow with its context: counted, not estimated."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specmla.backends.reference import ReferenceBackend
from specmla.testing import make_prompt_case

BUDGET = 256
DIMS: dict[str, Any] = {"num_heads": 2, "kv_lora_rank": 32, "rope_dim": 8, "nope_dim": 16}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.sizes: set[int] = set()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self._known.add(given.untyped_storage()._cdata)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known.add(name)
        self.sizes.add(size)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._free, name, size)

    def _free(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.live -= size


def measure(context: int, workspace_rows: int | None) -> LiveBytes:
    """Count what attending 8 new rows after that context makes, tables and workspace aside."""
    case = make_prompt_case([(8, context + 8)], page_size=64, v_dim=24, **DIMS)
    backend = ReferenceBackend()
    workspace = None if workspace_rows is None else case.workspace(workspace_rows)
    part = case.part(backend, workspace)
    attention, query = case.inputs(backend)
    with LiveBytes() as counter:
        attention.attend(query, part)
    return counter


def test_peak_and_largest_allocation_are_flat_in_the_context() -> None:
    counts = [measure(context, BUDGET) for context in (1024, 4096, 16_384)]
    assert len({c.peak for c in counts}) == 1
    # Keys and values of a chunk as `expand` projects them, per head P + R and V wide.
    assert {c.largest for c in counts} == {BUDGET * 2 * 24 * 4}
    # Between them: keys, values, float32 scores and their softmax, one copy of each at most.
    assert counts[0].peak <= 8 * BUDGET * 2 * 24 * 4


def test_one_pass_grows_with_the_context() -> None:
    """So the counter counts."""
    small, large = measure(1024, None), measure(4096, None)
    assert large.largest >= 3.9 * small.largest
    assert large.peak >= 3.5 * small.peak


def test_the_workspace_is_the_only_memory_of_gathered_rows() -> None:
    """One pass that fits reads into it as well."""
    inside, outside = measure(1000, 1024), measure(1000, None)
    assert 1008 * 40 * 4 in outside.sizes - inside.sizes
    assert inside.peak < outside.peak
