"""The fields of an EAGLE-3 head's config.json in its three spellings, brought into one.

* `Eagle3DeepseekV2ForCausalLM`: an MLA layer. `LlamaForCausalLMEagle3`: a Llama layer, whatever
  `model_type` says. Both flat.
* `speculators`: the layer's own fields stand in `transformer_layer_config`, which names its kind.

`eagle_aux_hidden_state_layer_ids` at the top counts the layers before which states are taken: 1
stands for the output of layer 0. In a section `eagle_config` it names the layers whose outputs are
taken. Without it they are those that the paper's heads have: the outputs of layers 1, L / 2 - 1 and
L - 4 of L.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafters.block_fields import architectures_of
from drafters.gqa_config import count_problems, gqa_problems, is_count
from drafters.speculators_config import is_speculators

MLA_HEAD, LLAMA_HEAD = "Eagle3DeepseekV2ForCausalLM", "LlamaForCausalLMEagle3"
ARCHITECTURES = (MLA_HEAD, LLAMA_HEAD)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYERS = "eagle_aux_hidden_state_layer_ids"
_LEAST = {"intermediate_size": 1, "vocab_size": 1, "draft_vocab_size": 1}


def is_eagle3(source: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is one of an EAGLE-3 head."""
    if is_speculators(source):
        return bool(source["speculators_model_type"] == "eagle3")
    return any(name in ARCHITECTURES for name in architectures_of(source))


def flat_fields(
    source: Mapping[str, Any], num_target_layers: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Give the fields, `target_layer_ids` among them, and everything that is wrong with them."""
    fields, found = _merged(source)
    fields["target_layer_ids"] = _layer_ids(source, fields, num_target_layers, found)
    found += [
        f"{name} is {fields[name]!r}, accepted are true, false"
        for name in FLAGS
        if not isinstance(fields.get(name, False), bool)
    ]
    found += [f"{name} is missing" for name in _LEAST if fields.get(name) is None]
    found += count_problems(_LEAST, {n: fields[n] for n in _LEAST if fields.get(n) is not None})
    only = {"hidden_act": "silu", "num_hidden_layers": 1, "embed_requires_grad": False}
    only["target_hidden_size"] = fields.get("hidden_size")
    for name, accepted in only.items():
        if fields.get(name) not in (None, accepted):
            found.append(f"{name} is {fields[name]!r}, accepted is {accepted!r}")
    if not fields["is_mla"]:
        found += gqa_problems(fields)
    elif fields.get("kv_lora_rank") is None:
        found.append("kv_lora_rank is missing")
    return fields, found


def _merged(source: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Put all fields at the top."""
    found: list[str] = []
    if is_speculators(source):
        kind, layer = source["speculators_model_type"], source.get("transformer_layer_config")
        if kind != "eagle3":
            found.append(f"speculators_model_type is {kind!r}, accepted is 'eagle3'")
        if not isinstance(layer, Mapping):
            found.append(f"transformer_layer_config is {layer!r}, accepted is an object")
            layer = {}
        own = {k: v for k, v in source.items() if k != "model_type"}
        return {**layer, **own, "is_mla": False}, found
    names, section = architectures_of(source), source.get("eagle_config") or {}
    if not any(name in ARCHITECTURES for name in names):
        found.append(
            f"architectures is {source.get('architectures')!r}, accepted are {list(ARCHITECTURES)}"
        )
    if not isinstance(section, Mapping):
        found.append(f"eagle_config is {section!r}, accepted is an object")
        section = {}
    fields = {**source, **{k: v for k, v in section.items() if k != LAYERS}}
    fields["is_mla"] = LLAMA_HEAD not in names
    if LLAMA_HEAD in names:
        fields["model_type"] = "llama"
    return fields, found


def _layer_ids(
    source: Mapping[str, Any], fields: Mapping[str, Any], layers: int | None, found: list[str]
) -> tuple[int, ...]:
    """Give the layers whose outputs are taken; add what is wrong to `found`."""
    section, ids, shift = source.get("eagle_config"), fields.get(LAYERS), 1
    if ids is None and isinstance(section, Mapping):
        ids, shift = section.get(LAYERS), 0
    if ids is None:
        if layers is None or layers < 6:  # below, they are not three
            found.append(f"{LAYERS} is missing")
            return ()
        return (1, layers // 2 - 1, layers - 4)
    if not isinstance(ids, list | tuple) or not ids or not all(map(is_count, ids)):
        found.append(f"{LAYERS} is {ids!r}, accepted is a list of integers, not empty")
        return ()
    return tuple(i - shift for i in ids)
