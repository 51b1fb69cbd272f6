"""Bytes of a checkpoint's weights, counted on modules that hold no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from specmla.config import read_field
from specmla.errors import ArgumentError
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekDecoderLayer, DeepseekForCausalLM

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
BLOCK = (128, 128)
"""Rows and columns of a weight that share a float32 scale (DeepSeek-V3, arXiv 2412.19437, 3.3)."""


def stored_weight_bytes(source: Mapping[str, Any]) -> int:
    """Count the bytes of the weights that a `config.json` describes, MTP layers left out.

    Norms, embedding, router and head are in the config's dtype; the other linear layers too, or in
    e4m3 with a float32 scale for each block of 128 x 128 where `quantization_config` says so.

    Raises:
        ArgumentError: the config does not tell: another architecture, dtype or quantisation.
    """
    config = DeepseekConfig.from_hf(source)
    name = read_field(source, "torch_dtype", read_field(source, "dtype"))
    if name not in DTYPES:
        raise ArgumentError(f"torch_dtype is {name!r}, accepted are {sorted(DTYPES)}")
    itemsize, blocks = DTYPES[name].itemsize, _has_blocks(read_field(source, "quantization_config"))
    with torch.device("meta"):
        whole = DeepseekForCausalLM(dataclasses.replace(config, num_layers=1))
        first = whole.model.layers[0]
        kinds = {config.is_moe_layer(i): i for i in range(config.num_layers)}
        layers = {kind: DeepseekDecoderLayer(config, i) for kind, i in kinds.items()}
    of_kind = {kind: _bytes(layer, itemsize, blocks) for kind, layer in layers.items()}
    outside = _bytes(whole, itemsize, blocks) - _bytes(first, itemsize, blocks)
    return outside + sum(of_kind[config.is_moe_layer(i)] for i in range(config.num_layers))


def _has_blocks(found: object) -> bool:
    if found is None:
        return False
    told = found if isinstance(found, Mapping) else {}
    got = (told.get("quant_method"), tuple(told.get("weight_block_size") or ()))
    if got != ("fp8", BLOCK):
        raise ArgumentError(
            f"quantization_config is {found!r}, accepted are null and fp8 with blocks of {BLOCK}"
        )
    return True


def _bytes(module: nn.Module, itemsize: int, blocks: bool) -> int:
    total = sum(4 * buffer.numel() for name, buffer in module.named_buffers() if "bias" in name)
    for name, part in module.named_modules():
        quantised = blocks and isinstance(part, nn.Linear) and name != "lm_head"
        for weight in part.parameters(recurse=False):
            if quantised and weight.dim() == 2:
                rows, columns = (-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True))
                total += weight.numel() + 4 * rows * columns
            else:
                total += weight.numel() * itemsize
    return total
