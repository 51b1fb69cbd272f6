"""What a DeepSeek-V2 or V3 checkpoint says of itself, frozen and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specmla.config import (
    MLAConfig,
    integer_problems,
    is_count,
    read_field,
    read_flag,
    read_number,
)
from specmla.errors import ArgumentError, kind_problem, require
from specmla.models.moe import MoEConfig

MODEL_TYPES = {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """A decoder: its attention, its sizes, its experts.

    Attributes:
        attention: dimensions of every MLA layer.
        num_layers: decoder layers, MTP layers not counted.
        vocab_size: W.
        intermediate_size: width of a dense MLP.
        max_position_embeddings: context limit.
        architecture: `DeepseekV2ForCausalLM` or `DeepseekV3ForCausalLM`.
        moe: None for a dense model.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: tokens that end a text; may be empty.
        bos_token_id: token that begins a text, or None.
        num_mtp_layers: layers after the last that the checkpoint may hold and that are skipped.
    """

    attention: MLAConfig
    num_layers: int
    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    architecture: str = "DeepseekV3ForCausalLM"
    moe: MoEConfig | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_mtp_layers: int = 0

    def __post_init__(self) -> None:
        reasons = integer_problems(self, 1, "num_layers", "vocab_size", "intermediate_size")
        reasons += integer_problems(self, 1, "max_position_embeddings") + integer_problems(
            self, 0, "num_mtp_layers"
        )
        if self.architecture not in MODEL_TYPES:
            reasons.append(
                f"architecture is {self.architecture!r}, accepted are {list(MODEL_TYPES)}"
            )
        reasons += kind_problem("attention", self.attention, MLAConfig)
        if not reasons:
            reasons = self._token_problems()
        require(reasons, "DeepseekConfig")

    def _token_problems(self) -> list[str]:
        reasons = []
        ids = self.eos_token_ids
        outside = [i for i in ids if not is_count(i) or not 0 <= i < self.vocab_size]
        if outside:
            reasons.append(f"eos_token_ids {outside} are outside 0 .. {self.vocab_size - 1}")
        if self.bos_token_id is not None and not is_count(self.bos_token_id):
            reasons.append(f"bos_token_id is {self.bos_token_id!r}, accepted is an integer or None")
        return reasons

    def is_moe_layer(self, layer_id: int) -> bool:
        """Tell whether decoder layer `layer_id` has experts."""
        return self.moe is not None and self.moe.is_moe_layer(layer_id)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | object) -> DeepseekConfig:
        """Read a `config.json` dict or a transformers config object.

        Raises:
            ArgumentError: another architecture, a missing field or a value that can't be served.
        """
        architecture = _architecture(source)
        names = ("num_hidden_layers", "vocab_size", "intermediate_size", "max_position_embeddings")
        reasons = [f"{name} is missing" for name in names if read_field(source, name) is None]
        for name, accepted in (("hidden_act", "silu"), ("mlp_bias", False)):
            found = read_field(source, name, accepted)
            if found != accepted:
                reasons.append(f"{name} is {found!r}, accepted is {accepted!r}")
        eos = read_field(source, "eos_token_id", ())
        eos = (eos,) if is_count(eos) else eos
        if not isinstance(eos, list | tuple):
            reasons.append(f"eos_token_id is {eos!r}, accepted are an integer and a list of them")
        require(reasons, "DeepseekConfig.from_hf")
        mtp = read_field(
            source, "num_nextn_predict_layers", read_field(source, "num_mtp_layers", 0)
        )
        return cls(
            attention=MLAConfig.from_hf(source),
            num_layers=read_field(source, "num_hidden_layers"),
            vocab_size=read_field(source, "vocab_size"),
            intermediate_size=read_field(source, "intermediate_size"),
            max_position_embeddings=read_field(source, "max_position_embeddings"),
            architecture=architecture,
            moe=_read_moe(source, architecture),
            tie_word_embeddings=read_flag(source, "tie_word_embeddings", False),
            eos_token_ids=tuple(eos),
            bos_token_id=read_field(source, "bos_token_id"),
            num_mtp_layers=mtp,
        )

    def to_hf(self) -> dict[str, Any]:
        """Give the `config.json` dict that `from_hf` and transformers read back."""
        at = self.attention
        scaling = None
        if at.rope_scaling is not None:
            kept = {k: v for k, v in asdict(at.rope_scaling).items() if v is not None}
            scaling = {"rope_type": "yarn", "type": "yarn", **kept}
        dense = {"first_k_dense_replace": self.num_layers}
        return {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": at.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": at.num_heads,
            "num_key_value_heads": at.num_heads,
            "q_lora_rank": at.q_lora_rank,
            "kv_lora_rank": at.kv_lora_rank,
            "qk_nope_head_dim": at.qk_nope_head_dim,
            "qk_rope_head_dim": at.qk_rope_head_dim,
            "v_head_dim": at.v_head_dim,
            "attention_bias": at.attention_bias,
            "rope_theta": at.rope_theta,
            "rope_scaling": scaling,
            "rope_interleave": at.rope_interleave,
            "rms_norm_eps": at.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "num_nextn_predict_layers": self.num_mtp_layers,
            **(dense if self.moe is None else asdict(self.moe)),
        }


def _architecture(source: Mapping[str, Any] | object) -> str:
    named = read_field(source, "architectures") or []
    if not named:
        model_type = read_field(source, "model_type")
        named = [name for name, kind in MODEL_TYPES.items() if kind == model_type] or [model_type]
    named = named if isinstance(named, list | tuple) else [named]
    found = [name for name in named if isinstance(name, str) and name in MODEL_TYPES]
    if not found:
        raise ArgumentError(
            f"DeepseekConfig.from_hf: architectures is {named}, accepted are {list(MODEL_TYPES)}"
        )
    return str(found[0])


def _read_moe(source: Mapping[str, Any] | object, architecture: str) -> MoEConfig | None:
    """Read the routing; a model without routed experts, or with dense layers only, has none."""
    layers = read_field(source, "num_hidden_layers")
    experts = read_field(source, "n_routed_experts")
    first = read_field(source, "first_k_dense_replace", 0)
    if experts is None or (is_count(first) and is_count(layers) and first >= layers):
        return None
    v3 = architecture == "DeepseekV3ForCausalLM"
    missing = [
        f"{name} is missing"
        for name in ("num_experts_per_tok", "moe_intermediate_size")
        if read_field(source, name) is None
    ]
    require(missing, "DeepseekConfig.from_hf")
    return MoEConfig(
        n_routed_experts=experts,
        num_experts_per_tok=read_field(source, "num_experts_per_tok"),
        moe_intermediate_size=read_field(source, "moe_intermediate_size"),
        n_shared_experts=read_field(source, "n_shared_experts", 0),
        first_k_dense_replace=first,
        moe_layer_freq=read_field(source, "moe_layer_freq", 1),
        topk_method=read_field(source, "topk_method", "noaux_tc" if v3 else "greedy"),
        scoring_func=read_field(source, "scoring_func", "sigmoid" if v3 else "softmax"),
        n_group=read_field(source, "n_group", 1),
        topk_group=read_field(source, "topk_group", 1),
        norm_topk_prob=read_flag(source, "norm_topk_prob", v3),
        routed_scaling_factor=read_number(source, "routed_scaling_factor", 1.0),
    )
