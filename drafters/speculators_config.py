"""Config.json files of `speculators` as plain JSON, brought into the spelling of DFlash ones.

The layers' own fields stand in `transformer_layer_config`. `aux_hidden_state_layer_ids` counts the
layers before which states are taken, as EAGLE-3 does: 1 stands for the output of layer 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specmla import ArgumentError

_KINDS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
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
    if not isinstance(kind, str) or kind not in _KINDS:
        found.append(f"speculators_model_type is {kind!r}, accepted are {list(_KINDS)}")
    found += [f"{name} is missing" for name in _NEEDED if not source.get(name)]
    layers = source.get("transformer_layer_config") or {}
    if not isinstance(layers, Mapping):
        found.append(f"transformer_layer_config is {layers!r}, accepted is an object")
        layers = {}
    ids = source.get("aux_hidden_state_layer_ids") or []
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        found.append(f"aux_hidden_state_layer_ids is {ids!r}, accepted is a list of integers")
    if source.get("logit_scale") not in (None, 1.0):
        found.append(f"logit_scale is {source['logit_scale']}, accepted is 1")
    if source.get("sliding_window_non_causal"):
        found.append("sliding_window_non_causal is True, accepted is False")
    if found:
        raise ArgumentError("speculators: " + "; ".join(found))
    own = {k: v for k, v in source.items() if k not in ("architectures", "model_type")}
    return {
        **layers,
        **own,
        "architectures": [_KINDS[kind]],
        "target_layer_ids": [i - 1 for i in ids],
        "sample_from_anchor": source.get("sample_from_anchor", False),
    }
