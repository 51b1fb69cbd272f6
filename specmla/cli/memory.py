"""`specmla info --model`: what serving a model takes, beside MHA and GQA, and what fits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specmla.accounting import GQA_HEADS, Account, Load, ModelSize, account
from specmla.cache.formats import cache_format
from specmla.cache.layout import CacheLayout
from specmla.cli.checkpoint import parse_dtype
from specmla.errors import ArgumentError, CheckpointError
from specmla.kernels.launch import Device, describe_device

ASSUMED = Device("sm_90", 132)
"""An H100 or H200, where no GPU is there to ask."""

_COUNTS = {"": 1, "k": 2**10, "m": 2**20}
_BYTES = {
    f"{letter}{rest}": (1000 if rest == "B" else 1024) ** power
    for power, letter in enumerate("KMGT", start=1)
    for rest in ("", "iB", "B")
} | {"": 1, "B": 1}


@dataclass(frozen=True)
class MemoryOptions:
    """The command's options as they were given."""

    model: Path
    context: str
    batch: int
    query_len: int
    page_size: int
    dtype: str
    cache_format: str | None
    gpu_memory: str | None
    gpu: str | None
    json: bool


def run_memory(options: MemoryOptions) -> int:
    """Print the account as text, or as one JSON line.

    Raises:
        CheckpointError: no readable config.
        ArgumentError: a value that can't be accepted.
    """
    memory = None if options.gpu_memory is None else parse_bytes(options.gpu_memory)
    device = _device(options.gpu)
    load = Load(parse_tokens(options.context), options.batch, options.query_len, device)
    model = ModelSize.from_hf(_read_config(options.model))
    found = account(model, _layout(options, model), load)
    if options.json:
        print(json.dumps(as_json(found, memory)))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for line in as_lines(found, memory):
        console.print(line, markup=False)
    return 0


def _layout(options: MemoryOptions, model: ModelSize) -> CacheLayout:
    at, dtype, packed = model.attention, parse_dtype(options.dtype), None
    if options.cache_format is not None:
        rows = at.kv_lora_rank, at.qk_rope_head_dim
        packed = cache_format(options.cache_format, *rows, dtype=dtype)
    return CacheLayout(at.cache_width, dtype, options.page_size, packed)


def parse_tokens(text: str) -> int:
    """Read a number of tokens: `8192`, `8k`, `1m` (of 1024).

    Raises:
        ArgumentError: anything else.
    """
    match = re.fullmatch(r"([0-9]+)([km]?)", text.lower())
    if match is None:
        raise ArgumentError(f"context is {text!r}, accepted are numbers as 8192, 8k or 1m")
    return int(match[1]) * _COUNTS[match[2]]


def parse_bytes(text: str) -> int:
    """Read bytes: `141G` and `141GiB` are of 2**30, `150GB` of 10**9.

    Raises:
        ArgumentError: anything else, or none at all.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    if match is None or match[2] not in _BYTES or not float(match[1]):
        raise ArgumentError(f"gpu_memory is {text!r}, accepted are sizes as 141G, 80GiB or 150GB")
    return int(float(match[1]) * _BYTES[match[2]])


def as_json(found: Account, memory: int | None) -> dict[str, Any]:
    """Give every figure of an account, bytes throughout."""
    batch, layout, model = found.load.batch, found.layout, found.model
    told: dict[str, Any] = {
        "context": found.load.context,
        "batch": batch,
        "query_len": found.load.query_len,
        "num_layers": model.num_layers,
        "page_size": layout.page_size,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "cache_format": layout.format.name if layout.format else None,
        "device": {"arch": found.load.device.arch, "num_sms": found.load.device.num_sms},
        "bytes_per_token_and_layer": {
            "mla": layout.bytes_per_row,
            "mha": found.mha_bytes_per_row,
            f"gqa_{GQA_HEADS}": found.gqa_bytes_per_row,
        },
        "bytes_per_token": found.bytes_per_token,
        "pages_per_request": found.pages_per_request,
        "pages": batch * found.pages_per_request,
        "cache_bytes_per_layer": found.cache_bytes(batch) // model.num_layers,
        "cache_bytes": found.cache_bytes(batch),
        "workspace_bytes": found.workspace_bytes(batch),
        "scratch_bytes": dict(found.scratch),
        "backend": found.preferred,
        "not_serving": {name: list(reasons) for name, reasons in found.refused.items()},
        "needed_bytes": found.needed_bytes(batch),
        "weight_bytes": model.weight_bytes,
        "weight_bytes_unknown": model.unknown or None,
    }
    if memory is not None:
        told["gpu_memory"] = memory
        told["requests_without_weights"] = found.fitting(memory)
        told["requests"] = _beside_weights(found, memory)
    return told


def as_lines(found: Account, memory: int | None) -> Iterator[str]:
    """Say the same for people."""
    load, layout, model = found.load, found.layout, found.model
    row, layers = layout.bytes_per_row, model.num_layers
    name = layout.format.name if layout.format else str(layout.dtype).removeprefix("torch.")
    yield f"{load.batch} requests of {load.context} tokens, {layers} layers"
    yield f"cache, {name}, pages of {layout.page_size} tokens"
    yield f"  a token and layer: {row:,} B"
    for label, other in (
        (f"MHA of {model.attention.num_heads} heads", found.mha_bytes_per_row),
        (f"GQA of {GQA_HEADS} heads", found.gqa_bytes_per_row),
    ):
        yield f"    {label}: {other:,} B, {other / row:.1f} times as much"
    yield f"  a token: {found.bytes_per_token:,} B"
    yield f"  a request: {found.pages_per_request:,} pages, {_size(found.cache_bytes(1))}"
    total = found.cache_bytes(load.batch)
    pages = load.batch * found.pages_per_request
    yield f"  all: {pages:,} pages, {_size(total // layers)} a layer, {_size(total)}"
    yield f"prefill workspace: {_size(found.workspace_bytes(load.batch))}"
    where = f"{load.device.arch} with {load.device.num_sms} SMs"
    yield f"scratch of a verify with {load.query_len} rows a request on {where}"
    for backend, scratch in found.scratch.items():
        yield f"  {backend}: {_size(scratch)}"
    for backend, reasons in found.refused.items():
        yield f"  {backend}: not served, {'; '.join(reasons)}"
    needed = found.needed_bytes(load.batch)
    yield f"cache, workspace and scratch ({found.preferred}): {_size(needed)}"
    weights = model.weight_bytes
    known = "not known: " + model.unknown if weights is None else _size(weights)
    yield f"weights as stored: {known}"
    if memory is not None:
        yield from _fitting_lines(found, memory)


def _fitting_lines(found: Account, memory: int) -> Iterator[str]:
    beside, alone = _beside_weights(found, memory), found.fitting(memory)
    yield f"in {_size(memory)}, requests of {found.load.context} tokens"
    yield f"  without weights: {alone:,}"
    if beside is not None:
        short = (found.model.weight_bytes or 0) - memory
        yield f"  beside the weights: {beside:,}" + (
            f" (the weights alone lack {_size(short)})" if short > 0 else ""
        )


def _beside_weights(found: Account, memory: int) -> int | None:
    weights = found.model.weight_bytes
    return None if weights is None else found.fitting(max(0, memory - weights))


def _size(count: int) -> str:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.2f} {name} ({count:,} B)"
    return f"{count:,} B"


def _device(text: str | None) -> Device:
    if text is None:
        return describe_device(torch.device("cuda")) if torch.cuda.is_available() else ASSUMED
    match = re.fullmatch(r"([a-z0-9_]+):([0-9]+)", text)
    if match is None or not int(match[2]):
        raise ArgumentError(f"gpu is {text!r}, accepted are ARCHITECTURE:SMS as sm_90:132")
    return Device(match[1], int(match[2]))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds {type(found).__name__}, accepted is an object")
    return found
