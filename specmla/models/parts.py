"""Modules that are no whole model, a drafter's say, from safetensors by name and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from specmla.errors import ArgumentError, CheckpointError
from specmla.models.empty import build_empty
from specmla.models.match import is_buffer, match_tensors
from specmla.models.scales import quantization_problems
from specmla.models.shards import CONFIG, WEIGHTS, read_headers, read_json
from specmla.models.weights import read_state

M = TypeVar("M", bound=nn.Module)


def load_part(
    make: Callable[[], M],
    directory: str | Path,
    prefix: str = "",
    *,
    shared: Collection[str] = (),
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    least: int = 0,
    rotated: int = 0,
) -> M:
    """Build a module and fill it with the tensors of a checkpoint whose names begin with `prefix`.

    e4m3 weights with scales are dequantised. Tensors without the prefix are not looked at; those
    with it must be the module's, every one of them.

    Args:
        make: builds the module; it is called without memory (on the meta device).
        directory: holds the safetensors, and a config.json for what it says of quantisation.
        prefix: of the names in the files; the module's own names follow it.
        shared: names (after the prefix) that may be in the files and are left there.
        device: where the module is put.
        dtype: of its weights; a router's keep float32 or wider.
        least, rotated: tensors that it has at least, and rotated values of a head; if the files
            can't hold them it is not built.

    Raises:
        CheckpointError: files are missing or damaged, tensors missing, unexpected or of another
            shape, all of which are named; or sizes that no file or tensor has.
        ArgumentError: `dtype` is not a floating type.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"load_part: dtype is {dtype!r}, accepted are floating types")
    folder = Path(directory)
    reasons = quantization_problems(read_part_config(folder).get("quantization_config"))
    if reasons:
        raise CheckpointError(f"{folder / CONFIG}: " + "; ".join(reasons))
    headers = read_headers(folder)
    module = build_empty(folder, headers, make, least, rotated)
    root = _nested(module, prefix)
    wanted, others = root.state_dict(), {prefix + name for name in shared}
    match = match_tensors(
        folder,
        root,
        headers,
        lambda name: not name.startswith(prefix) or name in others or is_buffer(name, wanted),
    )
    root.load_state_dict(read_state(folder, match, device, dtype), assign=True)
    return module.requires_grad_(False).eval()


def save_part(
    module: nn.Module, directory: str | Path, config: Mapping[str, Any], prefix: str = ""
) -> None:
    """Write config.json and model.safetensors, the module's names behind `prefix`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        prefix + name: value.detach().cpu().contiguous()
        for name, value in module.state_dict().items()
    }
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps({**config, "dtype": dtypes[0]}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_part_config(directory: str | Path) -> dict[str, Any]:
    """Read the config.json of a directory.

    Raises:
        CheckpointError: missing, not JSON or no object.
    """
    return read_json(Path(directory) / CONFIG)


def _nested(module: nn.Module, prefix: str) -> nn.Module:
    """Hang a module below as many as its prefix names, so that its names are those of the files."""
    for name in reversed([part for part in prefix.split(".") if part]):
        outer = nn.Module()
        outer.add_module(name, module)
        module = outer
    return module
