"""The fields of a block drafter's config.json, and what is wrong with them, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafters.gqa_config import count_problems, gqa_problems, is_count

ARCHITECTURES = {"DFlashDraftModel": False, "DSparkDraftModel": True}
"""Names, and whether row 0 (the anchor's) predicts the first draft where the config is silent."""
NAMES = {name: name for name in ARCHITECTURES} | {"Qwen3DSparkModel": "DSparkDraftModel"}
"""Names that files have, and ours."""
_SECTIONS = ("dflash_config", "dspark_config")
_FLAGS = ("sample_from_anchor", "enable_confidence_head")


def merged(source: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Give the fields at the top and in the sections, and what is wrong with the sections."""
    fields, found = dict(source), []
    for name in _SECTIONS:
        section = source.get(name)
        if isinstance(section, Mapping):
            fields |= section
        elif section is not None:
            found.append(f"{name} is {section!r}, accepted is an object")
    if fields.get("target_layer_ids") is None:
        fields["target_layer_ids"] = _spread(fields)
    return fields, found


def _spread(fields: Mapping[str, Any]) -> list[int] | None:
    """Give the layers of the target that DFlash takes where none are named.

    Spread evenly from the second to the last but two, or the middle one for a single layer.
    """
    layers, count = fields.get("num_target_layers"), fields.get("num_hidden_layers")
    if not is_count(layers) or not is_count(count) or not 0 < count < layers < 2**31 or layers < 4:
        return None
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def architectures_of(source: Mapping[str, Any]) -> list[str]:
    """Give the names in `architectures`, none where it is no list."""
    names = source.get("architectures")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list | tuple) else []


def architecture_of(fields: Mapping[str, Any]) -> str | None:
    """Give our name of a file's network; a DFlash one with a DSpark projector is a DSpark one."""
    names = (NAMES[name] for name in architectures_of(fields) if name in NAMES)
    name = next(names, None)
    return "DSparkDraftModel" if name and fields.get("projector_type") == "dspark" else name


def field_problems(fields: Mapping[str, Any]) -> list[str]:
    """List everything that is not served, the dimensions of MLA layers aside."""
    found = []
    if architecture_of(fields) is None:
        found.append(
            f"architectures is {fields.get('architectures')!r}, accepted are {list(NAMES)}"
        )
    if fields.get("projector_type") not in (None, "dflash", "dspark"):
        found.append(
            f"projector_type is {fields['projector_type']!r}, accepted are 'dflash', 'dspark'"
        )
    flags = {name: fields.get(name) for name in _FLAGS}
    found += [
        f"{name} is {value!r}, accepted are true, false"
        for name, value in flags.items()
        if not isinstance(value, bool | None)
    ]
    least = {"num_hidden_layers": 1, "intermediate_size": 1, "vocab_size": 1, "block_size": 1}
    needed = (*least, "mask_token_id", "target_layer_ids")
    found += [f"{name} is missing" for name in needed if fields.get(name) is None]
    given = {
        name: fields[name] for name in (*needed, "markov_rank") if fields.get(name) is not None
    }
    found += count_problems({**least, "markov_rank": 0}, given) + id_problems(given)
    found += reduced_problems(fields)
    mla = is_mla(fields)
    found += [] if mla else gqa_problems(fields)
    only = {
        "attention_mode": "mla" if mla else "gqa",
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
        "hidden_act": "silu",
        "sliding_window": None,
        "is_causal": False,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "shift_label": False,
        "logit_scale": 1.0,
        "output_multiplier": 1.0,
        "input_embedding_scale": 1.0,
        "final_logit_softcapping": None,
    }
    for name, accepted in only.items():
        got = fields.get(name, accepted)
        if name == "sliding_window" and fields.get("use_sliding_window") is False:
            continue
        if got != accepted and got is not None:
            found.append(f"{name} is {got!r}, accepted is {accepted!r}")
    return found


def id_problems(given: Mapping[str, Any]) -> list[str]:
    """List what is wrong with `mask_token_id` and `target_layer_ids`, if they are given."""
    found, size = [], given.get("vocab_size")
    most = size - 1 if is_count(size) and size > 0 else None
    last = "vocab_size - 1" if most is None else most
    if "mask_token_id" in given:
        token = given["mask_token_id"]
        if not is_count(token) or token < 0 or (most is not None and token > most):
            found.append(f"mask_token_id is {token!r}, accepted are 0 .. {last}")
    if "target_layer_ids" in given:
        ids = given["target_layer_ids"]
        if not isinstance(ids, list | tuple) or not ids or not all(map(is_count, ids)):
            found.append(f"target_layer_ids is {ids!r}, accepted is a list of integers, not empty")
    return found


def reduced_problems(given: Mapping[str, Any]) -> list[str]:
    """List what is wrong with `draft_vocab_size`, if it is given."""
    count, size = given.get("draft_vocab_size"), given.get("vocab_size")
    if count is None or not is_count(size) or (is_count(count) and 1 <= count <= size):
        return []
    return [f"draft_vocab_size is {count!r}, accepted are 1 .. vocab_size, {size}"]


def is_mla(fields: Mapping[str, Any]) -> bool:
    """Tell the layers' kind; MLA configs may count key heads as well."""
    mode, heads = fields.get("attention_mode"), fields.get("num_key_value_heads")
    return mode == "mla" or fields.get("kv_lora_rank") is not None or heads is None
