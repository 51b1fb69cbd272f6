"""Checkpoints in Hugging Face layout: config.json, and one safetensors file or an index of shards.

All headers are compared with the model before any weight is read; the model is built without
memory and takes each tensor as it comes, so that it exists once. Quantised linear layers (e4m3
with block, channel or tensor scales) are widened on the way, see `specmla.models.scales`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from specmla.errors import ArgumentError, CheckpointError, require
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.empty import build_empty
from specmla.models.kept_codes import Kept, kept_codes, require_codes
from specmla.models.kept_codes import keep_codes as put_codes
from specmla.models.match import Match, left_out, match_tensors
from specmla.models.scales import dequantise_into, quantization_problems
from specmla.models.shards import (
    CONFIG,
    WEIGHTS,
    Headers,
    list_some,
    read_headers,
    read_json,
    read_tensors,
)

_EMBEDDING = "model.embed_tokens.weight"
# The router decides in float32 at least, so its tensors are kept that wide.
_WIDE = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")


def load_checkpoint(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    keep_codes: bool = False,
) -> tuple[DeepseekForCausalLM, DeepseekConfig]:
    """Load a DeepSeek-V2 or V3 checkpoint for inference.

    Quantised linear layers are dequantised, but `kv_b_proj` if its codes are kept. Weights of MTP
    layers (`model.layers.N` for N >= num_hidden_layers), saved rotary buffers, scales of
    activations and a saved copy of a tied head are left out.

    Args:
        directory: holds config.json and the safetensors.
        device: where the model is put.
        dtype: of the weights; None for that of the embedding in the file. The router keeps float32
            or wider.
        keep_codes: let every `kv_b_proj` be an `E4M3UpProjection`; the checkpoint has to hold them
            as e4m3 weights with scales.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, another architecture, or tensors
            or scales are missing, unexpected or of another shape, or scales are zero, negative,
            NaN or infinite (all of them are named).
        ArgumentError: `dtype` is not a floating type.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"load_checkpoint: dtype is {dtype!r}, accepted are floating types")
    folder = Path(directory)
    config = read_config(folder)
    headers = read_headers(folder)
    model = _build_empty(folder, config, headers)
    match = _match(folder, model, headers)
    dtype = dtype or headers[match.sources[_EMBEDDING]][_EMBEDDING][1]
    if keep_codes:
        put_codes(model, device, dtype)
    kept = kept_codes(model)
    require_codes(folder, kept, match)
    model.load_state_dict(read_state(folder, match, device, dtype, kept), assign=True)
    return model.requires_grad_(False).eval(), config


@torch.no_grad()
def reload_checkpoint(model: DeepseekForCausalLM, directory: str | Path) -> None:
    """Read other weights of the same dimensions into a model, in place.

    Every tensor keeps its address, dtype and device, and the absorbed weights are views of them:
    captured graphs stay valid and compute with the new weights. The checkpoint may be quantised or
    not, whatever the last one was, but where codes are kept; their scales may be of any kind.

    Raises:
        CheckpointError: as `load_checkpoint`, or another config; nothing was written unless a file
            changes or fails while it is read.
    """
    folder = Path(directory)
    config = read_config(folder)
    if config != model.config:
        raise CheckpointError(f"{folder / CONFIG} is {config}, accepted is {model.config}")
    match = _match(folder, model, read_headers(folder))
    state, kept = model.state_dict(), kept_codes(model)
    require_codes(folder, kept, match)
    for name, stored in _stored(folder, match):
        if name in kept:
            kept[name].load(stored, match.scales[name])
        else:
            _fill(state[name], stored, match.scales.get(name))


def save_checkpoint(model: DeepseekForCausalLM, directory: str | Path) -> None:
    """Write config.json and model.safetensors, readable by `load_checkpoint` and transformers.

    The directory is created if it does not exist; a tied head is not written twice.

    Raises:
        ArgumentError: a model with kept codes.
    """
    names = list_some(list(kept_codes(model)))
    require([f"{names}: e4m3 codes, accepted are widened weights"] if names else [], "save")
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
        CheckpointError: missing, not JSON, another architecture, another quantisation than e4m3
            weights, or values that can't be served.
    """
    path = Path(directory) / CONFIG
    source = read_json(path)
    reasons = quantization_problems(source.get("quantization_config"))
    if reasons:
        raise CheckpointError(f"{path}: " + "; ".join(reasons))
    try:
        return DeepseekConfig.from_hf(source)
    except ArgumentError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_state(
    folder: Path,
    match: Match,
    device: torch.device | str,
    dtype: torch.dtype,
    kept: Kept = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Read all matched tensors, dequantised, in `dtype`; the router's in float32 or wider.

    Codes of `kept` are copied into those modules as they are.
    """
    state: dict[str, Tensor] = {}
    for name, stored in _stored(folder, match):
        if name in kept:
            kept[name].load(stored, match.scales[name])
            state[name] = kept[name].weight
            continue
        wide = torch.promote_types(dtype, torch.float32) if name.endswith(_WIDE) else dtype
        state[name] = torch.empty(stored.shape, dtype=wide, device=device)
        _fill(state[name], stored, match.scales.get(name))
    return state


def _match(folder: Path, model: DeepseekForCausalLM, headers: Headers) -> Match:
    wanted = model.state_dict()
    return match_tensors(folder, model, headers, lambda n: left_out(n, model.config, wanted))


def _stored(folder: Path, match: Match) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors as they are stored, file by file."""
    for shard in sorted(set(match.sources.values())):
        names = [name for name, source in match.sources.items() if source == shard]
        yield from read_tensors(folder / shard, names)


def _fill(target: Tensor, stored: Tensor, scale: Tensor | None) -> None:
    """Copy a stored tensor, so that nothing of the model stays mapped to its file."""
    if scale is None:
        target.copy_(stored)
    else:
        dequantise_into(target, stored, scale)


def _build_empty(folder: Path, config: DeepseekConfig, headers: Headers) -> DeepseekForCausalLM:
    least, moe = config.num_layers, config.moe
    if moe is not None and least <= sum(map(len, headers.values())):
        least += moe.n_routed_experts * sum(map(moe.is_moe_layer, range(config.num_layers)))
    rotated = config.attention.qk_rope_head_dim
    return build_empty(folder, headers, lambda: DeepseekForCausalLM(config), least, rotated)
