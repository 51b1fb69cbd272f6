"""The corpus: deduplicated sources, split into training and held-out by top-level module name.

The split is by name so that no file of a held-out package is ever trained on. Held-out files come
first in the deduplication: a copy of one of them (vendored, say) leaves the training part.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pairtrain.source import SourceFile, find_sources, interpreter_roots, read_source

SPLIT_SALT = "specmla-pair-1"
NEAR_DUPLICATE = 0.8  # share of a file's lines seen in earlier files from which on it is dropped


@dataclass(frozen=True)
class Corpus:
    """Training and held-out files, in an order that is random but fixed by their names."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]
    files_found: int
    duplicates: int

    def summary(self) -> dict[str, object]:
        """Give the figures for the report: files, bytes and the held-out modules."""
        return {
            "files_found": self.files_found,
            "duplicates_dropped": self.duplicates,
            "train_files": len(self.train),
            "train_bytes": sum(len(file.text) for file in self.train),
            "train_modules": len({file.module for file in self.train}),
            "held_out_files": len(self.held_out),
            "held_out_bytes": sum(len(file.text) for file in self.held_out),
            "held_out_modules": sorted({file.module for file in self.held_out}),
        }


def is_held_out(module: str, percent: float) -> bool:
    """Tell whether `module` belongs to the held-out `percent` of names, by its hash alone."""
    digest = hashlib.sha256(f"{SPLIT_SALT}/{module}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < percent / 100 * 2**32


def load_corpus(
    roots: Sequence[Path] | None, max_bytes: int, held_out_percent: float, workers: int
) -> Corpus:
    """Read, deduplicate and split the Python files below `roots` (None: the interpreter's).

    Args:
        roots: folders whose direct children are top-level modules and packages.
        max_bytes: training text is cut there, whole files, in the fixed random order.
        held_out_percent: of the module names.
        workers: processes that read; 1 reads in this one.
    """
    paths = [
        pair
        for root in (interpreter_roots() if roots is None else roots)
        for pair in find_sources(root)
    ]
    files = [file for file in _read_all(paths, workers) if file is not None]
    files.sort(
        key=lambda file: (
            not is_held_out(file.module, held_out_percent),
            hashlib.sha256(file.name.encode()).digest(),
            file.digest,
        )
    )
    kept = _deduplicate(files)
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    size = 0
    for file in kept:
        if is_held_out(file.module, held_out_percent):
            held_out.append(file)
        elif size < max_bytes:
            train.append(file)
            size += len(file.text)
    return Corpus(tuple(train), tuple(held_out), len(files), len(files) - len(kept))


def _read_all(paths: list[tuple[Path, str]], workers: int) -> list[SourceFile | None]:
    if workers == 1:
        return [read_source(path, name) for path, name in paths]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return pool.starmap(read_source, paths, chunksize=64)


def _deduplicate(files: list[SourceFile]) -> list[SourceFile]:
    """Keep the first of equal files, then drop those made mostly of lines of earlier ones."""
    distinct = list({file.digest: file for file in reversed(files)}.values())[::-1]
    return [
        file
        for file, share in zip(distinct, seen_before([f.lines for f in distinct]), strict=True)
        if share < NEAR_DUPLICATE
    ]


def seen_before(lines: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Give each array's share of values that occur in an earlier array; an empty one has 1."""
    sizes = np.array([len(part) for part in lines], dtype=np.int64)
    owner = np.repeat(np.arange(len(lines)), sizes)
    if not len(owner):
        return np.ones(len(lines))
    _, first, inverse = np.unique(np.concatenate(lines), return_index=True, return_inverse=True)
    earlier = owner[first[inverse]] < owner
    seen = np.bincount(owner, weights=earlier, minlength=len(lines))
    share: NDArray[np.float64] = np.where(sizes > 0, seen / np.maximum(sizes, 1), 1.0)
    return share
