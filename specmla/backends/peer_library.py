"""Operator libraries of other projects, given by file or installed; never needed, never imported.

A library is a shared object that registers torch operators when it is loaded. It is loaded on
first use, in the process that uses everything else.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class PeerLibrary:
    """One library.

    Attributes:
        option: of the command line or the constructor, which names the file.
        package, member: the installed package that has it, and where below its folder.
        namespace: of its operators in `torch.ops`.
        file: given by the user, or None.
        hint: how to get it, for people.
    """

    option: str
    package: str
    member: str
    namespace: str
    file: Path | None = None
    hint: str = ""

    def absent(self) -> list[str]:
        """Say why there is no such file; empty if there is. Nothing is loaded."""
        found = self.file or self._installed()
        if found is None:
            rest = f"; {self.hint}" if self.hint else ""
            return [f"not given ({self.option} FILE) and no installed {self.package} has it{rest}"]
        if not found.is_file():
            return [f"{self.option} is {found}, accepted is an existing file"]
        return []

    def missing(self) -> list[str]:
        """Say why its operators can't be had here; empty if they can: then it is loaded."""
        found = self.file or self._installed()
        if self.absent() or found is None:
            return self.absent()
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
