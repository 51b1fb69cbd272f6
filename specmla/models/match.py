"""Compares a checkpoint's headers with a model, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from specmla.errors import CheckpointError
from specmla.models import scales
from specmla.models.config import DeepseekConfig
from specmla.models.shards import CONFIG, Headers, list_some, read_tensors
from specmla.weight_scales import CODES, value_problems

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Match:
    """Where the tensors of a model are.

    Attributes:
        sources: file of every tensor of the model's state.
        scales: of the quantised weights, checked, by the weight's name.
    """

    sources: Mapping[str, str]
    scales: Mapping[str, Tensor]


def match_tensors(
    folder: Path, model: nn.Module, headers: Headers, is_left_out: Callable[[str], bool]
) -> Match:
    """Find every tensor of the model and the scales of the quantised ones.

    `is_left_out` names tensors of the files that the model does without.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; scales are missing,
            superfluous, of another shape, or not finite and positive. All of them are named.
    """
    wanted = model.state_dict()
    sources: dict[str, str] = {}
    found_scales: dict[str, list[tuple[str, str]]] = {}
    unexpected, shapes, integers = [], [], []
    for shard, tensors in headers.items():
        for name, (shape, dtype) in tensors.items():
            weight = scales.scaled_weight(name)
            if name in wanted and not dtype.is_floating_point:
                integers.append(f"{name} ({shard}) {dtype}")
            if name in wanted and shape != tuple(wanted[name].shape):
                shapes.append(f"{name} ({shard}) {list(shape)} for {list(wanted[name].shape)}")
            elif name in wanted:
                sources[name] = shard
            elif weight in wanted:
                found_scales.setdefault(weight, []).append((name, shard))
            elif not is_left_out(name):
                unexpected.append(f"{name} ({shard})")
    wrong = {text.split(" ", 1)[0] for text in shapes}
    missing = [name for name in wanted if name not in sources and name not in wrong]
    values, scaled = _read_scales(folder, model, headers, sources, found_scales)
    labelled = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("of another shape", shapes),
        ("of no floating dtype", integers),
    )
    reasons = [f"{label}: {list_some(names)}" for label, names in labelled if names]
    reasons += [f"quantised: {list_some(scaled, '; ')}"] if scaled else []
    if reasons:
        raise CheckpointError(f"{folder}: tensors do not fit {CONFIG}: " + "; ".join(reasons))
    return Match(sources, values)


def _read_scales(
    folder: Path,
    model: nn.Module,
    headers: Headers,
    sources: Mapping[str, str],
    found: Mapping[str, list[tuple[str, str]]],
) -> tuple[dict[str, Tensor], list[str]]:
    """Read the scales of all e4m3 weights, and list everything that is wrong with them."""
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    weights: dict[str, dict[str, str]] = {}  # by file and name of their scale
    reasons = []
    for weight, shard in sources.items():
        shape, dtype = headers[shard][weight]
        of_weight = found.get(weight, [])
        names = [name for name, _ in of_weight]
        if dtype != CODES:
            reasons += [f"{name} scales {weight}, which is {dtype}" for name in names]
        elif weight not in linear:
            reasons.append(f"{weight} is {dtype}, accepted are linear layers")
        elif len(names) != 1:
            both = " and ".join(names) or "none"
            accepted = " or ".join(weight + suffix for suffix in scales.SUFFIXES)
            reasons.append(f"the scale of {weight} is {both}, accepted is {accepted}")
        else:
            name, source = of_weight[0]
            problems = scales.header_problems(name, shape, *headers[source][name])
            if not problems:
                weights.setdefault(source, {})[name] = weight
            reasons += problems
    values: dict[str, Tensor] = {}
    for source, by_name in weights.items():
        for name, scale in read_tensors(folder / source, by_name):
            values[by_name[name]] = scale.clone()
            reasons += value_problems(name, scale)
    return values, reasons


def left_out(name: str, config: DeepseekConfig, wanted: Mapping[str, Tensor]) -> bool:
    """Tell whether a decoder does without this tensor: MTP layers, saved buffers, a tied head."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= config.num_layers:
        return int(layer[1]) < config.num_layers + config.num_mtp_layers
    return is_buffer(name, wanted)


def is_buffer(name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Tell whether this is a saved rotary buffer or the scale of a wanted weight's activations."""
    if name.endswith(scales.LEFT_OUT):
        return f"{name.removesuffix(scales.LEFT_OUT)}.weight" in wanted
    return name.endswith(".rotary_emb.inv_freq")
