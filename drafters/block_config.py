"""What a block drafter's config.json says, in the spelling of DFlash and DSpark checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.block_fields import (
    ARCHITECTURES,
    architecture_of,
    field_problems,
    id_problems,
    is_mla,
    merged,
    reduced_problems,
)
from drafters.gqa_config import GQAConfig, count_problems, scaling_fields
from drafters.speculators_config import block_fields, is_speculators
from specmla import ArgumentError, CheckpointError, DeepseekConfig, MLAConfig, read_part_config


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter of MLA or grouped-query layers.

    Attributes:
        attention: dimensions of its layers, which say their kind; hidden_size is the target's.
        num_layers: L of the drafter.
        intermediate_size: width of its MLPs.
        vocab_size: W, the target's.
        block_size: rows of a block, the anchor's included.
        mask_token_id: stands for the tokens to be drafted; never drafted itself.
        target_layer_ids: decoder layers of the target whose outputs make the context.
        sample_from_anchor: row j predicts the token after its own position, so that a block gives
            `block_size` drafts; else its own, and row 0 none.
        markov_rank: of the sequential head; 0 for none.
        confidence_head: whether there is one.
        architecture: `DFlashDraftModel` or `DSparkDraftModel`.
        draft_vocab_size: ids that it can draft, by a head of its own; None: all, by the target's.
    """

    attention: MLAConfig | GQAConfig
    num_layers: int
    intermediate_size: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sample_from_anchor: bool
    markov_rank: int = 0
    confidence_head: bool = False
    architecture: str = "DFlashDraftModel"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be built.

        Raises:
            ArgumentError: names every field that is wrong.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        least = {"num_layers": 1, "intermediate_size": 1, "vocab_size": 1, "markov_rank": 0}
        least["block_size"] = 1 if self.sample_from_anchor is True else 2
        found = count_problems(least, given) + id_problems(given) + reduced_problems(given)
        found += [
            f"{name} is {given[name]!r}, accepted are True, False"
            for name in ("sample_from_anchor", "confidence_head")
            if not isinstance(given[name], bool)
        ]
        if self.architecture not in list(ARCHITECTURES):
            found.append(
                f"architecture is {self.architecture!r}, accepted are {list(ARCHITECTURES)}"
            )
        if found:
            raise ArgumentError("BlockConfig: " + "; ".join(found))

    @property
    def num_drafts(self) -> int:
        """Most drafts of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def mla(self) -> MLAConfig:
        """Dimensions of MLA layers.

        Raises:
            ArgumentError: the layers are others.
        """
        if isinstance(self.attention, GQAConfig):
            raise ArgumentError("attention is grouped-query, accepted here is MLA: GQABlockModel")
        return self.attention

    @classmethod
    def from_hf(cls, source: Mapping[str, Any]) -> BlockConfig:
        """Read a config.json; fields stand at its top or in `dflash_config` / `dspark_config`.

        Those of `speculators` are read as well (`speculators_config`).

        Raises:
            ArgumentError: another architecture or what is not served; every reason is named.
        """
        source = block_fields(source) if is_speculators(source) else source
        fields, found = merged(source)
        found += field_problems(fields)
        attention: MLAConfig | GQAConfig | None = None
        if is_mla(fields):
            try:
                attention = MLAConfig.from_hf(source)
            except ArgumentError as error:
                found.append(str(error))
        elif not found:
            attention = GQAConfig.from_hf(source)
        if found or attention is None:
            raise ArgumentError("BlockConfig.from_hf: " + "; ".join(found))
        architecture = architecture_of(fields)
        assert architecture is not None
        from_anchor, reduced = fields.get("sample_from_anchor"), fields.get("draft_vocab_size")
        return cls(
            attention=attention,
            num_layers=fields["num_hidden_layers"],
            intermediate_size=fields["intermediate_size"],
            vocab_size=fields["vocab_size"],
            block_size=fields["block_size"],
            mask_token_id=fields["mask_token_id"],
            target_layer_ids=tuple(fields["target_layer_ids"]),
            sample_from_anchor=ARCHITECTURES[architecture] if from_anchor is None else from_anchor,
            markov_rank=fields.get("markov_rank") or 0,
            confidence_head=bool(fields.get("enable_confidence_head")),
            architecture=architecture,
            draft_vocab_size=None if reduced == fields["vocab_size"] else reduced,
        )

    def to_hf(self) -> dict[str, Any]:
        """Give the config.json that `from_hf` reads back."""
        section = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "sample_from_anchor": self.sample_from_anchor,
        }
        if not isinstance(self.attention, GQAConfig):
            section["attention_mode"] = "mla"
        if self.markov_rank:
            section |= {"markov_rank": self.markov_rank, "markov_head_type": "vanilla"}
        if self.confidence_head:
            section |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        return _dims_to_hf(self.attention) | {
            "architectures": [self.architecture],
            "vocab_size": self.vocab_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "draft_vocab_size": self.draft_vocab_size or self.vocab_size,
            "dflash_config": section,
        }


def read_block_config(directory: str | Path) -> BlockConfig:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: missing, not JSON, or nothing that can be served; every reason is named.
    """
    try:
        return BlockConfig.from_hf(read_part_config(directory))
    except ArgumentError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def check_target(config: BlockConfig, target: DeepseekConfig, where: str) -> None:
    """Refuse a target that the drafter was not made for.

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
    outside = [i for i in config.target_layer_ids if not 0 <= i < target.num_layers]
    if outside:
        found.append(
            f"target_layer_ids has {outside}, the target's are 0 .. {target.num_layers - 1}"
        )
    if config.block_size > target.max_position_embeddings:
        found.append(
            f"block_size is {config.block_size}, accepted are values up to the target's "
            f"max_position_embeddings, {target.max_position_embeddings}"
        )
    if found:
        raise CheckpointError(f"{where}: " + "; ".join(found))


def _dims_to_hf(at: MLAConfig | GQAConfig) -> dict[str, Any]:
    if isinstance(at, GQAConfig):
        return at.to_hf()
    return {
        "model_type": "deepseek_v3",
        "hidden_size": at.hidden_size,
        "num_attention_heads": at.num_heads,
        "q_lora_rank": at.q_lora_rank,
        "kv_lora_rank": at.kv_lora_rank,
        "qk_nope_head_dim": at.qk_nope_head_dim,
        "qk_rope_head_dim": at.qk_rope_head_dim,
        "v_head_dim": at.v_head_dim,
        "attention_bias": at.attention_bias,
        "rope_theta": at.rope_theta,
        "rope_scaling": scaling_fields(at.rope_scaling),
        "rope_interleave": at.rope_interleave,
        "rms_norm_eps": at.rms_norm_eps,
    }
