"""Scaled e4m3 weights of linear layers in a checkpoint, and the weights they stand for.

Weights are widened as they are loaded, so that absorption and every product run in the model's
dtype (`kv_b_proj` may stay codes, see `E4M3UpProjection`); activations are not quantised, whatever
scheme the checkpoint names for them, and `input_scale` tensors are left out. The forms of scales
are in `specmla.weight_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specmla.weight_scales import BLOCK, scale_shapes

SUFFIXES = ("_scale_inv", "_scale")
LEFT_OUT = ".input_scale"
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRATEGIES = ("tensor", "channel", "block")


def quantization_problems(found: object) -> list[str]:
    """List what of a `quantization_config` can't be served; None is a checkpoint without one."""
    if found is None:
        return []
    if not isinstance(found, Mapping):
        return [f"quantization_config is {found!r}, accepted are null and an object"]
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8_problems(found)
    if method == "compressed-tensors":
        return _compressed_problems(found)
    return [
        f"quantization_config.quant_method is {method!r}, accepted are 'fp8' and "
        "'compressed-tensors'"
    ]


def _fp8_problems(found: Mapping[str, Any]) -> list[str]:
    reasons = []
    if found.get("fmt") not in (None, "e4m3"):
        reasons.append(f"quantization_config.fmt is {found['fmt']!r}, accepted is 'e4m3'")
    if found.get("weight_block_size") not in (None, [BLOCK, BLOCK]):
        reasons.append(
            f"quantization_config.weight_block_size is {found['weight_block_size']!r}, accepted "
            f"are null and [{BLOCK}, {BLOCK}]"
        )
    return reasons


def _compressed_problems(found: Mapping[str, Any]) -> list[str]:
    reasons = []
    if found.get("format") != "float-quantized":
        reasons.append(
            f"quantization_config.format is {found.get('format')!r}, accepted is 'float-quantized'"
        )
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        return [*reasons, f"quantization_config.config_groups is {groups!r}, accepted are objects"]
    for name, group in groups.items():
        weights = group.get("weights")
        weights = weights if isinstance(weights, Mapping) else {}
        for key, accepted in (
            ("num_bits", (8,)),
            ("type", ("float",)),
            ("symmetric", (True,)),
            ("strategy", _STRATEGIES),
            ("block_structure", (None, [BLOCK, BLOCK])),
        ):
            if weights.get(key) not in accepted:
                reasons.append(
                    f"quantization_config.config_groups.{name}.weights.{key} is "
                    f"{weights.get(key)!r}, accepted are {list(accepted)}"
                )
    return reasons


def scaled_weight(name: str) -> str | None:
    """Name the weight that a tensor called `name` scales; None if it is no scale."""
    for suffix in SUFFIXES:
        if name.endswith(f".weight{suffix}"):
            return name.removesuffix(suffix)
    return None


def header_problems(
    name: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: torch.dtype
) -> list[str]:
    """List what is wrong with the header of the scale `name` of a weight of `shape` [O, I]."""
    found = []
    accepted = scale_shapes(shape)
    if scale_shape not in accepted:
        shapes = ", ".join(str(list(s)) for s in accepted)
        found.append(f"{name} has shape {list(scale_shape)}, accepted are {shapes}")
    if dtype not in _SCALE_DTYPES:
        found.append(f"{name} is {dtype}, accepted are {[str(d) for d in _SCALE_DTYPES]}")
    return found


def dequantise_into(target: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write `codes * scale` into `target` [O, I], any floating dtype and device.

    The product is made in float32 (exact in float64 for a float64 target) and rounded once more to
    the target's dtype. `BLOCK` rows are widened at a time.

    Args:
        target: written; its storage stays.
        codes: [O, I] e4m3.
        scale: of one of `scale_shapes`, > 0.
    """
    wide = torch.promote_types(target.dtype, torch.float32)
    outputs, inputs = codes.shape
    by_block = tuple(scale.shape) == scale_shapes((outputs, inputs))[0]
    factor = scale.to(wide)
    if by_block:
        factor = factor.repeat_interleave(BLOCK, dim=1)[:, :inputs]
    else:
        factor = factor.reshape(-1, 1).expand(outputs, 1)
    for index, first in enumerate(range(0, outputs, BLOCK)):
        rows = slice(first, first + BLOCK)
        target[rows].copy_(codes[rows].to(wide).mul_(factor[index] if by_block else factor[rows]))
