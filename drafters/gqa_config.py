"""Dimensions of grouped-query attention, as config.json files of Qwen3 and Llama say them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from specmla import ArgumentError, YarnScaling, read_rope

_QK_NORM = {"qwen3": True, "llama": False}


@dataclass(frozen=True, slots=True)
class GQAConfig:
    """A layer's dimensions.

    Attributes:
        hidden_size: D.
        num_heads, num_kv_heads: of queries, and of keys and values.
        head_dim: width of each.
        rms_norm_eps: of all norms.
        rope_theta: base of the rotary angles.
        qk_norm: queries and keys are normed by head.
        rope_scaling: YaRN, or None; the scores' own scale stays what it is.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qk_norm: bool = True
    rope_scaling: YarnScaling | None = None

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotated width: all of a head."""
        return self.head_dim

    @property
    def rope_interleave(self) -> bool:
        """Pairs are (i, i + d / 2)."""
        return False

    @classmethod
    def from_hf(cls, source: Mapping[str, Any]) -> GQAConfig:
        """Read fields that `gqa_problems` has nothing against."""
        heads, (theta, scaling) = source["num_attention_heads"], read_rope(source)
        return cls(
            hidden_size=source["hidden_size"],
            num_heads=heads,
            num_kv_heads=source["num_key_value_heads"],
            head_dim=source.get("head_dim") or source["hidden_size"] // heads,
            rms_norm_eps=source.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            qk_norm=_QK_NORM[source["model_type"]],
            rope_scaling=scaling,
        )

    def to_hf(self) -> dict[str, Any]:
        """Give the fields that `from_hf` reads back."""
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling_fields(self.rope_scaling),
        }


def gqa_problems(source: Mapping[str, Any]) -> list[str]:
    """List everything of a config.json that these layers can't serve."""
    least = {"hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    found = [f"{name} is missing" for name in least if source.get(name) is None]
    given = {name: source[name] for name in (*least, "head_dim") if source.get(name) is not None}
    wrong = count_problems({**least, "head_dim": 1}, given)
    found += wrong
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in _QK_NORM:
        found.append(
            f"model_type is {kind!r}, accepted without kv_lora_rank are {sorted(_QK_NORM)}"
        )
    found += _rope_problems(source)
    epsilon = source.get("rms_norm_eps", 1e-6)
    if not _is_number(epsilon) or epsilon <= 0:
        found.append(f"rms_norm_eps is {epsilon!r}, accepted are finite numbers > 0")
    if source.get("attention_bias"):
        found.append("attention_bias is True, accepted is False")
    if source.get("use_sliding_window"):
        found.append("use_sliding_window is True, accepted is False")
    layers = source.get("layer_types") or ()
    if not isinstance(layers, list | tuple):
        found.append(f"layer_types is {layers!r}, accepted is a list of 'full_attention'")
    elif others := sorted({str(kind) for kind in layers if kind != "full_attention"}):
        found.append(f"layer_types has {others}, accepted is 'full_attention'")
    heads, shared = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if not wrong and heads and shared and heads % shared:
        found.append(
            f"num_attention_heads is {heads}, accepted are multiples of num_key_value_heads, "
            f"{shared}"
        )
    return found


def count_problems(least: Mapping[str, int], given: Mapping[str, Any]) -> list[str]:
    """List the fields given that are no integers of at least `least`, or 2**31 and more."""
    return [
        f"{name} is {given[name]!r}, accepted are integers >= {low} and below 2**31"
        for name, low in least.items()
        if name in given
        and (
            not isinstance(given[name], int)
            or isinstance(given[name], bool)
            or not low <= given[name] < 2**31
        )
    ]


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value is an integer (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def _rope_problems(source: Mapping[str, Any]) -> list[str]:
    sections = {name: source.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    found = [
        f"{name} is {section!r}, accepted is an object"
        for name, section in sections.items()
        if not isinstance(section, Mapping)
    ]
    if found:
        return found
    try:
        theta, _ = read_rope(source, "rotary settings")
    except ArgumentError as error:
        return [str(error)]
    return [] if theta > 1 else [f"rope_theta is {theta!r}, accepted are finite numbers > 1"]


def scaling_fields(scaling: YarnScaling | None) -> dict[str, Any] | None:
    """Give the `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    kept = {name: value for name, value in asdict(scaling).items() if value is not None}
    return {"rope_type": "yarn", **kept}


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]
