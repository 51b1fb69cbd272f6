"""What an EAGLE-3 head's config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafters.eagle3_fields import FLAGS, LAYERS, MLA_HEAD, flat_fields
from drafters.gqa_config import GQAConfig
from specmla import ArgumentError, CheckpointError, DeepseekConfig, MLAConfig

ARCHITECTURE = MLA_HEAD


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of a head, and where it norms.

    Attributes:
        attention: dimensions of its layer, which say its kind; hidden_size is the target's.
        intermediate_size: of its MLP.
        vocab_size: W of the target.
        draft_vocab_size: ids that it can draft.
        target_layer_ids: the decoder layers of the target whose outputs it takes; mostly three.
        norm_before_residual: the residual stream begins with the normed state.
        norm_before_fc: the states side by side are normed as one before they are fused.
        fc_norm: each of them is, by itself.
        norm_output: the state that goes to the next depth is the normed one.
    """

    attention: MLAConfig | GQAConfig
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be built.

        Raises:
            ArgumentError: names every field that is wrong.
        """
        found, ids = [], self.target_layer_ids
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            found.append(
                f"draft_vocab_size is {self.draft_vocab_size}, accepted are 1 .. {self.vocab_size}"
            )
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            found.append(f"target_layer_ids is {ids}, accepted are different layers")
        if self.norm_before_fc and self.fc_norm:
            found.append("norm_before_fc and fc_norm are True, accepted is one of them")
        if found:
            raise ArgumentError("Eagle3Config: " + "; ".join(found))

    @property
    def is_gqa(self) -> bool:
        """Whether its layer is a grouped-query one."""
        return isinstance(self.attention, GQAConfig)

    @property
    def mla(self) -> MLAConfig:
        """Dimensions of an MLA layer.

        Raises:
            ArgumentError: the layer is another.
        """
        if isinstance(self.attention, GQAConfig):
            raise ArgumentError("attention is grouped-query, accepted here is MLA: GQAEagle3Model")
        return self.attention

    @classmethod
    def from_hf(
        cls, source: Mapping[str, Any], num_target_layers: int | None = None
    ) -> Eagle3Config:
        """Read a config.json, see `eagle3_fields` for its spellings.

        Args:
            source: the file's content.
            num_target_layers: of the target, for a file that does not name its layers.

        Raises:
            ArgumentError: another architecture, or what is not served; every reason is named.
        """
        fields, found = flat_fields(source, num_target_layers)
        attention: MLAConfig | GQAConfig | None = None
        if not found:
            try:
                kind = MLAConfig if fields["is_mla"] else GQAConfig
                attention = kind.from_hf(fields)
            except ArgumentError as error:
                found.append(str(error))
        if found or attention is None:
            raise ArgumentError("Eagle3Config.from_hf: " + "; ".join(found))
        return cls(
            attention=attention,
            intermediate_size=fields["intermediate_size"],
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields["draft_vocab_size"],
            target_layer_ids=fields["target_layer_ids"],
            **{name: fields.get(name, False) for name in FLAGS},
        )

    def to_hf(self) -> dict[str, Any]:
        """Give the config.json that `from_hf` reads back: flat for MLA, else of speculators."""
        own = {
            "draft_vocab_size": self.draft_vocab_size,
            LAYERS: [i + 1 for i in self.target_layer_ids],
            **{name: getattr(self, name) for name in FLAGS},
        }
        if isinstance(self.attention, GQAConfig):
            sizes = {
                "vocab_size": self.vocab_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": 1,
                "hidden_act": "silu",
            }
            return own | {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": self.attention.to_hf() | sizes,
            }
        decoder = DeepseekConfig(
            self.attention, 1, self.vocab_size, self.intermediate_size, 1
        ).to_hf()
        return decoder | own | {"architectures": [ARCHITECTURE]}


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
