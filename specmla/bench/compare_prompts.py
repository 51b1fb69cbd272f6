"""Held-out prompts: excerpts of standard library modules that no shipped model was trained on.

The models are trained on Python sources of which some top-level modules, chosen by the hash of
their names, are left out (`examples/pairtrain/corpus.py`; vendored copies of theirs too). The same
hash finds them here, in whatever Python runs.
"""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from specmla.errors import ArgumentError

SPLIT_SALT = "specmla-pair-1"
HELD_OUT_PERCENT = 4
LENGTHS = (32, 64, 96, 160)
"""Tokens of the prompts, in turn."""
_EXCERPT = 4000
_LEAST = 2000


class _Encoding(Protocol):
    ids: list[int]


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, sequence: str) -> _Encoding:
        """Turn a text into ids."""
        ...


def is_held_out(module: str) -> bool:
    """Tell whether a top-level module was left out of training, by its name's hash."""
    digest = hashlib.sha256(f"{SPLIT_SALT}/{module}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_PERCENT / 100 * 2**32


def held_out_files(root: Path | None = None) -> dict[str, list[Path]]:
    """Find the held-out modules of the standard library, with their sources in order of names.

    Args:
        root: its folder, the running interpreter's if None.

    Raises:
        ArgumentError: there are none (an interpreter without sources).
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found: dict[str, list[Path]] = {}
    for module in sorted(filter(is_held_out, sys.stdlib_module_names)):
        files = [path for path in _sources(root, module) if path.stat().st_size >= _LEAST]
        if files:
            found[module] = files
    if not found:
        raise ArgumentError(
            "prompts: this Python's standard library has no sources of held-out modules; give a "
            "JSON file with a list of texts by --prompts"
        )
    return found


def held_out_prompts(
    encoder: Encoder, count: int, seed: int = 0, root: Path | None = None
) -> list[list[int]]:
    """Cut prompts from held-out files, each from the start of a line on, the modules in turn.

    Args:
        encoder: the target's tokenizer.
        count: how many.
        seed: of the choice.
        root: see `held_out_files`.
    """
    files, chance = held_out_files(root), random.Random(seed)
    names, prompts = sorted(files), list[list[int]]()
    while len(prompts) < count:
        path = chance.choice(files[names[len(prompts) % len(names)]])
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        first = chance.randrange(max(len(lines) - 10, 1))
        excerpt = "".join(lines[first:])[:_EXCERPT]
        ids = encoder.encode(excerpt).ids[: LENGTHS[len(prompts) % len(LENGTHS)]]
        if ids:
            prompts.append(ids)
    return prompts


def _sources(root: Path, module: str) -> Iterator[Path]:
    single = root / f"{module}.py"
    if single.is_file():
        yield single
    yield from sorted((root / module).rglob("*.py"))
