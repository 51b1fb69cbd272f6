"""One Python source file of the running interpreter: found, read, cleaned and fingerprinted."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAX_FILE_BYTES = 300_000  # larger ones are mostly generated tables
MAX_MEAN_LINE = 120  # bytes a line; data literals lie above
GENERATED = "_sysconfigdata"  # settings of a build, written by it
SITE_NAMES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class SourceFile:
    """A cleaned source file.

    Attributes:
        module: top-level module or package, what the split is made by.
        name: path below its root, with slashes.
        text: the source without its leading comment block (licence headers, shebang).
        digest: of the text without comments, blank lines and indentation.
        lines: [n] int64, sorted hashes of its distinct normalised lines.
    """

    module: str
    name: str
    text: str
    digest: bytes
    lines: NDArray[np.int64]


def interpreter_roots() -> list[Path]:
    """List the standard library's folder and every site-packages folder on `sys.path`."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    roots += [Path(entry) for entry in sys.path if Path(entry).name in SITE_NAMES]
    return [root for root in dict.fromkeys(root.resolve() for root in roots) if root.is_dir()]


def find_sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, name below `root`) of its Python files, nested site folders left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SITE_NAMES and name != "__pycache__"
        )
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith(GENERATED):
                path = Path(folder) / file
                yield path, path.relative_to(root).as_posix()


def read_source(path: Path, name: str) -> SourceFile | None:
    """Read and fingerprint a file; None if it is unreadable, tiny, huge or mostly data."""
    try:
        if not 64 <= path.stat().st_size <= MAX_FILE_BYTES:
            return None
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    text = _without_header(text)
    lines = text.split("\n")
    if len(text) < 64 or len(text) > MAX_MEAN_LINE * len(lines):
        return None
    code = [line.strip() for line in lines]
    code = [line for line in code if len(line) > 3 and not line.startswith("#")]
    hashes = {_hash_line(line) for line in code}
    return SourceFile(
        module=name.split("/")[0].removesuffix(".py"),
        name=name,
        text=text,
        digest=hashlib.blake2b("\n".join(code).encode(), digest_size=16).digest(),
        lines=np.array(sorted(hashes), dtype=np.int64),
    )


def _hash_line(line: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(line.encode(), digest_size=8).digest(), "little", signed=True
    )


def _without_header(text: str) -> str:
    """Drop the comment and blank lines before the first line of code."""
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
    return "\n".join(lines[first:])
