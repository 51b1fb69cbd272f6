"""The size of a model, as the command line writes it, and the config that it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from pairtrain.tokenizer import END_OF_TEXT_ID
from specmla.config import MLAConfig
from specmla.models.config import DeepseekConfig

ROPE = 32
NOPE = 32
VALUE = 32
RANK = 128
CONTEXT = 2048


@dataclass(frozen=True)
class ModelSize:
    """Depth and width; the attention dims are the same for all.

    Attributes:
        layers: decoder layers, all dense.
        hidden: width of the residual stream.
        heads: query heads.
        mlp: width of the SwiGLU.
    """

    layers: int
    hidden: int
    heads: int
    mlp: int

    @classmethod
    def parse(cls, text: str) -> ModelSize:
        """Read `LAYERSxHIDDEN` or `LAYERSxHIDDENxHEADSxMLP`, such as `11x160` or `2x128x4x384`.

        Without them there are 4 heads, and an MLP of 2.75 times the width, a multiple of 32.
        """
        try:
            numbers = [int(part) for part in text.split("x")]
        except ValueError:
            numbers = []
        if len(numbers) == 2:
            numbers += [4, round(numbers[1] * 2.75 / 32) * 32]
        if len(numbers) != 4 or min(numbers) < 1:
            raise ValueError(
                f"size: {text!r}; accepted are LAYERSxHIDDEN and LAYERSxHIDDENxHEADSxMLP"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        """Give what `parse` reads."""
        return f"{self.layers}x{self.hidden}x{self.heads}x{self.mlp}"

    def config(self, vocab_size: int) -> DeepseekConfig:
        """Give the config of a dense DeepSeek-V3 with tied embeddings of this size."""
        return DeepseekConfig(
            attention=MLAConfig(
                hidden_size=self.hidden,
                num_heads=self.heads,
                kv_lora_rank=RANK,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=ROPE,
                v_head_dim=VALUE,
            ),
            num_layers=self.layers,
            vocab_size=vocab_size,
            intermediate_size=self.mlp,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_ids=(END_OF_TEXT_ID,),
        )
