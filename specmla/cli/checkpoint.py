"""Loads a model and its tokenizer from a directory, or the pair that ships with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specmla.errors import ArgumentError, CheckpointError
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.weights import load_checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Pair:
    """A target, a draft model of the same vocabulary, their tokenizer and prompts."""

    target: DeepseekForCausalLM
    draft: DeepseekForCausalLM
    tokenizer: Tokenizer
    prompts: tuple[str, ...]


def load_shipped_pair(device: torch.device, dtype: torch.dtype = torch.float32) -> Pair:
    """Load the trained pair of the package.

    Raises:
        CheckpointError: the installation lacks a file or it is damaged.
    """
    root = Path(str(files("specmla"))) / "assets"
    target, _ = load_checkpoint(root / "target", device=device, dtype=dtype)
    draft, _ = load_checkpoint(root / "draft", device=device, dtype=dtype)
    prompts = json.loads((root / "prompts.json").read_text(encoding="utf-8"))
    return Pair(target, draft, load_tokenizer(root / "target"), tuple(prompts))


def use_one_thread(device: torch.device) -> None:
    """Keep torch to one CPU thread: the shipped models are too small to share between cores, and
    threads that wait for each other fall far behind as soon as anything else runs."""
    if device.type == "cpu":
        torch.set_num_threads(1)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json`.

    Raises:
        CheckpointError: missing or unreadable.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint needs a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception on bad content
        raise CheckpointError(f"{path} can't be read: {error}") from error


def parse_device(name: str) -> torch.device:
    """Turn a name into a device that exists here.

    Raises:
        ArgumentError: an unknown name, or CUDA where there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"device is {name!r}, accepted are cpu, cuda and cuda:N") from error
    if device.type not in {"cpu", "cuda"}:
        raise ArgumentError(f"device is {name!r}, accepted are cpu, cuda and cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ArgumentError(f"device is {name!r}, this machine has {count} CUDA devices")
    return device


def parse_dtype(name: str) -> torch.dtype:
    """Turn a name into a dtype.

    Raises:
        ArgumentError: another name.
    """
    if name not in _DTYPES:
        raise ArgumentError(f"dtype is {name!r}, accepted are {sorted(_DTYPES)}")
    return _DTYPES[name]
