"""Config.json files of `speculators` as plain JSON, brought into the spelling of DFlash ones.

The layers' own fields stand in `transformer_layer_config`. `aux_hidden_state_layer_ids` counts the
layers before which states are taken, as EAGLE-3 does: 1 stands for the output of layer 0. Where
`sample_from_anchor` is missing the proposal tells: as many drafts as rows, or one fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafters.gqa_config import is_count
from specmla import ArgumentError

KINDS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
_NEEDED = ("transformer_layer_config", "aux_hidden_state_layer_ids")


def is_speculators(source: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is one of speculators."""
    return "speculators_model_type" in source


def block_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    """Give the fields of a block drafter's config.json.

    Raises:
        ArgumentError: another kind of drafter, scaled logits, blocks in windows; every reason is
            named.
    """
    kind, found = source["speculators_model_type"], []
    if not isinstance(kind, str) or kind not in KINDS:
        found.append(f"speculators_model_type is {kind!r}, accepted are {list(KINDS)}")
    found += [f"{name} is missing" for name in _NEEDED if not source.get(name)]
    layers = source.get("transformer_layer_config") or {}
    if not isinstance(layers, Mapping):
        found.append(f"transformer_layer_config is {layers!r}, accepted is an object")
        layers = {}
    ids = source.get("aux_hidden_state_layer_ids") or []
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        found.append(f"aux_hidden_state_layer_ids is {ids!r}, accepted is a list of integers")
    if source.get("sliding_window_non_causal"):
        found.append("sliding_window_non_causal is True, accepted is False")
    from_anchor = source.get("sample_from_anchor")
    if from_anchor is None:
        from_anchor = _proposes_block(source)
    if from_anchor is None and kind == "dspark":  # there are such of either kind
        found.append("sample_from_anchor is missing")
    if found:
        raise ArgumentError("speculators: " + "; ".join(found))
    own = {k: v for k, v in source.items() if k not in ("architectures", "model_type")}
    return {
        **layers,
        **own,
        "architectures": [KINDS[kind]],
        "target_layer_ids": [i - 1 for i in ids],
        "sample_from_anchor": bool(from_anchor) if from_anchor is None else from_anchor,
    }


def _proposes_block(source: Mapping[str, Any]) -> bool | None:
    """Tell whether as many drafts are proposed as a block has rows; None if the file is silent."""
    section = source.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    size = source.get("block_size")
    if not is_count(count) or not is_count(size) or count not in (size, size - 1):
        return None
    return bool(count == size)
