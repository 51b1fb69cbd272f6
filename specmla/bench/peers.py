"""Operator libraries of other projects, given by file or installed; never needed, never imported.

A library is a shared object that registers torch operators when it is loaded. It is loaded on
first use, in the process that times everything else.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import Requirements
from specmla.mask import DraftMask

MASKS = frozenset({DraftMask.CAUSAL, DraftMask.FULL})
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class PeerFiles:
    """The libraries named on the command line; None: look for an installed package."""

    flashmla: Path | None = None
    fa3: Path | None = None


@dataclass(frozen=True)
class PeerLibrary:
    """One library.

    Attributes:
        option: of the command line, which names the file.
        package, member: the installed package that has it, and where below its folder.
        namespace: of its operators in `torch.ops`.
        file: given by the user, or None.
    """

    option: str
    package: str
    member: str
    namespace: str
    file: Path | None = None

    def missing(self) -> list[str]:
        """Say why its operators can't be had here; empty if they can."""
        found = self.file or self._installed()
        if found is None:
            return [f"not given ({self.option} FILE) and no installed {self.package} has it"]
        if not found.is_file():
            return [f"{self.option} is {found}, accepted is an existing file"]
        reason = _load(found)
        return [] if reason is None else [f"{found.name} can't be loaded: {reason}"]

    def operator(self, name: str) -> Callable[..., Any]:
        """Give an operator of a library that is not `missing`."""
        found: Callable[..., Any] = getattr(getattr(torch.ops, self.namespace), name)
        return found

    def _installed(self) -> Path | None:
        spec = importlib.util.find_spec(self.package)
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        files = [Path(folder) / self.member for folder in folders]
        return next((file for file in files if file.is_file()), None)


@functools.lru_cache(maxsize=8)
def _load(file: Path) -> str | None:
    """Load once a process; give the reason if that fails."""
    try:
        torch.ops.load_library(str(file))
    except (OSError, RuntimeError) as error:
        cause = error.__cause__ or error
        return str(cause).splitlines()[0]
    return None


def lse_or_nan(lse: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give an LSE of the shape its library documents, else NaN: the check then notes it."""
    return lse if lse.shape == shape else lse.new_full(shape, float("nan"))


def shape_problems(
    need: Requirements, *, page_sizes: str, serves_page: bool, devices: Iterable[str] = ("cuda",)
) -> list[str]:
    """List what both peers can't serve of `need`: they are built for one model family on sm_90."""
    found = []
    if need.device.type not in devices:
        found.append(f"device is {need.device.type!r}, accepted are {list(devices)}")
    elif need.device.type == "cuda":
        got = torch.cuda.get_device_capability(need.device)
        if got != CAPABILITY:
            found.append(f"compute capability is {got[0]}.{got[1]}, accepted is 9.0")
    if need.dtype not in DTYPES:
        found.append(f"dtype is {need.dtype}, accepted are {[str(d) for d in DTYPES]}")
    if (need.kv_lora_rank, need.qk_rope_head_dim) != (512, 64):
        found.append(
            f"kv_lora_rank and qk_rope_head_dim are {need.kv_lora_rank} and "
            f"{need.qk_rope_head_dim}, accepted are 512 and 64"
        )
    if not serves_page:
        found.append(f"page_size is {need.page_size}, accepted are {page_sizes}")
    missing = sorted(mask.value for mask in need.masks - MASKS)
    if missing:
        found.append(f"masks {missing} are not served, accepted are ['causal', 'full']")
    return found
