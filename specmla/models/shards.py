"""The files of a Hugging Face checkpoint: its JSON, its shards, their headers, their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specmla.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
Headers = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shape and dtype of every tensor of every file, by file and name."""

_LISTED = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,  # maps of ids, beside the weights; no weight has these
    "BOOL": torch.bool,
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: missing, not JSON or no object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, accepted is a JSON object")
    return found


def read_headers(folder: Path) -> Headers:
    """Read shape and dtype of every tensor of the single file or of all shards, no weights.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or holds an unknown dtype.
    """
    return {name: _read_header(folder / name) for name in _find_shards(folder)}


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a file; they may be mapped to it.

    Raises:
        CheckpointError: truncated or corrupt.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error


def list_some(names: list[str], separator: str = ", ") -> str:
    """List at most a few names, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return separator.join(names[:_LISTED]) + more


def _find_shards(folder: Path) -> list[str]:
    """Name the weight files; one that the index names and the folder lacks is an error."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")
        return [WEIGHTS]
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map of tensor names to files")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{folder / INDEX} names files outside its directory: {outside}")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder}: {list_some(absent)} named in {INDEX} and missing")
    return names


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), _DTYPES[s.get_dtype()]) for n, s in found.items()}
    except KeyError as error:
        raise CheckpointError(
            f"{path}: a tensor has dtype {error}, accepted are {list(_DTYPES)}"
        ) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error
