"""Checkpoints in Hugging Face layout: config.json, and one safetensors file or an index of shards.

All headers are compared with the model before any weight is read; the model is built without
memory and takes each tensor as it comes, so that it exists once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specmla.errors import ArgumentError, CheckpointError
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# The router decides in float32 at least, so its tensors are kept that wide.
_WIDE = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
_LISTED = 8


def load_checkpoint(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[DeepseekForCausalLM, DeepseekConfig]:
    """Load a DeepSeek-V2 or V3 checkpoint for inference.

    Weights of MTP layers (`model.layers.N` for N >= num_hidden_layers), saved rotary buffers and a
    saved copy of a tied head are left out.

    Args:
        directory: holds config.json and the safetensors.
        device: where the model is put.
        dtype: of the weights; None for that of the embedding in the file. The router keeps float32
            or wider.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, another architecture, or tensors
            are missing, unexpected or of another shape (all of them are named).
        ArgumentError: `dtype` is not a floating type.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"load_checkpoint: dtype is {dtype}, accepted are floating types")
    folder = Path(directory)
    config = read_config(folder)
    shards = _find_shards(folder)
    headers = {name: _read_header(folder / name) for name in sorted(set(shards))}
    model = _build_empty(folder, config, headers)
    wanted = model.state_dict()
    sources = _match(folder, wanted, headers, config)
    state: dict[str, Tensor] = {}
    dtype = dtype or headers[sources["model.embed_tokens.weight"]]["model.embed_tokens.weight"][1]
    for shard in sorted(set(sources.values())):
        names = [name for name, source in sources.items() if source == shard]
        state |= _read_tensors(folder / shard, names, torch.device(device), dtype)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval(), config


def save_checkpoint(model: DeepseekForCausalLM, directory: str | Path) -> None:
    """Write config.json and model.safetensors, readable by `load_checkpoint` and transformers.

    The directory is created if it does not exist; a tied head is not written twice.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    config = model.config.to_hf()
    config["dtype"] = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(directory: str | Path) -> DeepseekConfig:
    """Read `config.json` of a checkpoint.

    Raises:
        CheckpointError: missing, not JSON, another architecture, quantised, or values that can't be
            served.
    """
    path = Path(directory) / CONFIG
    source = _read_json(path)
    if source.get("quantization_config") is not None:
        raise CheckpointError(
            f"{path}: quantization_config is set, accepted are checkpoints in float32, float16 or "
            "bfloat16"
        )
    try:
        return DeepseekConfig.from_hf(source)
    except ArgumentError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, accepted is a JSON object")
    return found


def _find_shards(folder: Path) -> list[str]:
    """Name the weight files; one that the index names and the folder lacks is an error."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")
        return [WEIGHTS]
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map of tensor names to files")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{folder / INDEX} names files outside its directory: {outside}")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder}: {_some(absent)} named in {INDEX} and missing")
    return names


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Read shape and dtype of every tensor of a file, no weights."""
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


def _build_empty(
    folder: Path,
    config: DeepseekConfig,
    headers: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
) -> DeepseekForCausalLM:
    """Build the model without memory, unless the files can't hold its layers and experts: a count
    of 10**9 would be built one by one."""
    tensors = [shape for header in headers.values() for shape, _ in header.values()]
    least, moe = config.num_layers, config.moe
    if moe is not None and least <= len(tensors):
        least += moe.n_routed_experts * sum(map(moe.is_moe_layer, range(config.num_layers)))
    rope, widest = (
        config.attention.qk_rope_head_dim,
        max(map(max, filter(None, tensors)), default=0),
    )
    if least > len(tensors) or rope > widest:
        raise CheckpointError(
            f"{folder}: {CONFIG} asks for {least} tensors or more and {rope} rotated values, the "
            f"files hold {len(tensors)}, none wider than {widest}"
        )
    try:
        with torch.device("meta"):
            return DeepseekForCausalLM(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder}: {CONFIG} has sizes no tensor can have: {reason}"
        ) from error


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _match(
    folder: Path,
    wanted: Mapping[str, Tensor],
    headers: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    config: DeepseekConfig,
) -> dict[str, str]:
    """Give the file of every wanted tensor, or raise with all that does not fit."""
    sources: dict[str, str] = {}
    unexpected, shapes = [], []
    for shard, tensors in headers.items():
        for name, (shape, _) in tensors.items():
            if name not in wanted:
                if not _left_out(name, config):
                    unexpected.append(f"{name} ({shard})")
            elif shape != tuple(wanted[name].shape):
                shapes.append(f"{name} ({shard}) {list(shape)} for {list(wanted[name].shape)}")
            else:
                sources[name] = shard
    wrong = {text.split(" ", 1)[0] for text in shapes}
    missing = [name for name in wanted if name not in sources and name not in wrong]
    reasons = [
        f"{label}: {_some(names)}"
        for label, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    if reasons:
        raise CheckpointError(f"{folder}: tensors do not fit {CONFIG}: " + "; ".join(reasons))
    return sources


def _left_out(name: str, config: DeepseekConfig) -> bool:
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= config.num_layers:
        return int(layer[1]) < config.num_layers + config.num_mtp_layers
    return name.endswith(".rotary_emb.inv_freq")


def _read_tensors(
    path: Path, names: Iterable[str], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Copy tensors out of a file, so that nothing of the model stays mapped to it."""
    state = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                wide = torch.promote_types(dtype, torch.float32) if name.endswith(_WIDE) else dtype
                stored = file.get_tensor(name)
                state[name] = torch.empty(stored.shape, dtype=wide, device=device).copy_(stored)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error
    return state


def _some(names: list[str]) -> str:
    """List at most a few names, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
