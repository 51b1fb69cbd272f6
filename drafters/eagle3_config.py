"""What an EAGLE-3 head's config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specmla import ArgumentError, CheckpointError, DeepseekConfig, MLAConfig

ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_ONLY = {"hidden_act": "silu", "norm_before_residual": False, "norm_before_fc": False}


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of a head.

    Attributes:
        attention: dimensions of its layer; hidden_size is the target's.
        intermediate_size: of its MLP.
        vocab_size: W of the target.
        draft_vocab_size: ids that it can draft.
        target_layer_ids: the three decoder layers of the target whose outputs it takes.
    """

    attention: MLAConfig
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what can't be built.

        Raises:
            ArgumentError: names every field that is wrong.
        """
        found = []
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            found.append(
                f"draft_vocab_size is {self.draft_vocab_size}, accepted are 1 .. {self.vocab_size}"
            )
        if len(set(self.target_layer_ids)) != 3 or min(self.target_layer_ids) < 0:
            found.append(f"target_layer_ids is {self.target_layer_ids}, accepted are three layers")
        if found:
            raise ArgumentError("Eagle3Config: " + "; ".join(found))

    @classmethod
    def from_hf(cls, source: Mapping[str, Any]) -> Eagle3Config:
        """Read a config.json.

        `eagle_aux_hidden_state_layer_ids` counts the layers before which states are taken: 1 stands
        for the output of layer 0.

        Raises:
            ArgumentError: another architecture, attention other than MLA, or what is not served;
                every reason is named.
        """
        names = source.get("architectures") or []
        found = []
        if ARCHITECTURE not in names:
            found.append(f"architectures is {names!r}, accepted is [{ARCHITECTURE!r}]")
        required = ("intermediate_size", "vocab_size", "draft_vocab_size", _LAYERS, "kv_lora_rank")
        found += [f"{name} is missing" for name in required if source.get(name) is None]
        found += [
            f"{name} is {source[name]!r}, accepted is {wanted!r}"
            for name, wanted in _ONLY.items()
            if source.get(name, wanted) != wanted
        ]
        if source.get("num_hidden_layers", 1) != 1:
            found.append(f"num_hidden_layers is {source['num_hidden_layers']}, accepted is 1")
        if found:
            raise ArgumentError("Eagle3Config.from_hf: " + "; ".join(found))
        return cls(
            attention=MLAConfig.from_hf(source),
            intermediate_size=source["intermediate_size"],
            vocab_size=source["vocab_size"],
            draft_vocab_size=source["draft_vocab_size"],
            target_layer_ids=tuple(i - 1 for i in source[_LAYERS]),
        )

    def to_hf(self) -> dict[str, Any]:
        """Give the config.json that `from_hf` reads back."""
        decoder = DeepseekConfig(
            self.attention, 1, self.vocab_size, self.intermediate_size, 1
        ).to_hf()
        return decoder | {
            "architectures": [ARCHITECTURE],
            "draft_vocab_size": self.draft_vocab_size,
            _LAYERS: [i + 1 for i in self.target_layer_ids],
        }


def check_eagle3(config: Eagle3Config, target: DeepseekConfig, where: str) -> None:
    """Refuse a target that the head was not made for.

    Raises:
        CheckpointError: names everything that differs.
    """
    found = [
        f"{name} is {got}, the target's is {wanted}"
        for name, got, wanted in (
            ("hidden_size", config.attention.hidden_size, target.attention.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
        )
        if got != wanted
    ]
    if outside := [i for i in config.target_layer_ids if i >= target.num_layers]:
        found.append(f"target_layer_ids has {outside}, accepted are 0 .. {target.num_layers - 1}")
    if found:
        raise CheckpointError(f"{where}: " + "; ".join(found))
