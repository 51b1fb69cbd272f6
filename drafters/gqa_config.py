"""Dimensions of grouped-query attention, as config.json files of Qwen3 and Llama say them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qk_norm: bool = True

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotated width: all of a head."""
        return self.head_dim

    @property
    def rope_interleave(self) -> bool:
        """Pairs are (i, i + d / 2)."""
        return False

    @property
    def rope_scaling(self) -> None:
        """Positions are not scaled."""
        return None

    @classmethod
    def from_hf(cls, source: Mapping[str, Any]) -> GQAConfig:
        """Read fields that `gqa_problems` has nothing against."""
        rope = source.get("rope_parameters") or {}
        heads = source["num_attention_heads"]
        return cls(
            hidden_size=source["hidden_size"],
            num_heads=heads,
            num_kv_heads=source["num_key_value_heads"],
            head_dim=source.get("head_dim") or source["hidden_size"] // heads,
            rms_norm_eps=source.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", source.get("rope_theta", 10000.0)),
            qk_norm=_QK_NORM[source["model_type"]],
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
            "rope_scaling": None,
        }


def gqa_problems(source: Mapping[str, Any]) -> list[str]:
    """List everything of a config.json that these layers can't serve."""
    needed = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    found = [f"{name} is missing" for name in needed if source.get(name) is None]
    if source.get("model_type") not in _QK_NORM:
        found.append(
            f"model_type is {source.get('model_type')!r}, accepted without kv_lora_rank are "
            f"{sorted(_QK_NORM)}"
        )
    rope = source.get("rope_parameters") or {}
    scaling = source.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        found.append(f"rope_scaling is of type {kind!r}, accepted is none")
    if source.get("attention_bias"):
        found.append("attention_bias is True, accepted is False")
    if source.get("use_sliding_window"):
        found.append("use_sliding_window is True, accepted is False")
    others = {kind for kind in source.get("layer_types") or () if kind != "full_attention"}
    if others:
        found.append(f"layer_types has {sorted(others)}, accepted is 'full_attention'")
    if not found and source["num_attention_heads"] % source["num_key_value_heads"]:
        found.append(
            f"num_attention_heads is {source['num_attention_heads']}, accepted are multiples of "
            f"num_key_value_heads, {source['num_key_value_heads']}"
        )
    return found
