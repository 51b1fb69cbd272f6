"""DeepSeek-V3's multi-token prediction module (arXiv 2412.19437, section 2.2), as it is served.

For the token at position i + 1 and the target's hidden state h_i of the row before it (after the
final norm):

    x = eh_proj [enorm(Emb(t_{i+1})) ; hnorm(h_i)]        the embedding first, 0 at position i = 0
    g = shared_head.norm(layer(x))                        a decoder layer of the target's kind
    logits of t_{i+2} = head(g)                           the target's head

For later depths g takes the place of h: the module is used again, and a logit has passed exactly
one norm. The row of (h_i, t_{i+1}) stands at position i.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from specmla.backends.base import AttentionBackend
from specmla.cache.latent import LatentCache
from specmla.errors import CheckpointError
from specmla.metadata import StepMetadata
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekDecoderLayer, DeepseekForCausalLM
from specmla.models.parts import load_part
from specmla.models.weights import read_config
from specmla.rope import RopeAngles
from specmla.row_local import Linear, RMSNorm

_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


class MTPModule(DeepseekDecoderLayer):
    """One module; embedding, head and rotary angles are the target's."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config, config.num_layers)
        hidden, eps = config.attention.hidden_size, config.attention.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps=eps)
        self.hnorm = RMSNorm(hidden, eps=eps)
        self.eh_proj = Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps=eps)})

    def fuse(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Join token embeddings and hidden states `[..., D]` at `positions` `[...]`."""
        embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0.0)
        fused: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return fused

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the head's norm: what the head and the next depth take."""
        normed: Tensor = self.shared_head["norm"](hidden)
        return normed

    @torch.no_grad()
    def predict(
        self,
        embedded: Tensor,
        hidden: Tensor,
        angles: RopeAngles,
        cache: LatentCache,
        layer_id: int,
        metadata: StepMetadata,
        backend: AttentionBackend,
    ) -> Tensor:
        """Run the rows of a step, `[T, D]` each; give their states for the head `[T, D]`."""
        fused = self.fuse(embedded, hidden, metadata.positions)
        return self.normed(self.forward(fused, angles, cache, layer_id, metadata, backend))


def load_mtp(
    directory: str | Path, target: DeepseekForCausalLM, dtype: torch.dtype | None = None
) -> MTPModule:
    """Load the first MTP module beside a target, from a whole checkpoint or a folder of its own.

    Its tensors are those of `model.layers.L.`, L the target's decoder layers. Copies of embedding
    and head are left out: the target's are used.

    Args:
        directory: holds config.json and the safetensors.
        target: gives sizes, device, and dtype if none is asked for.
        dtype: of the weights.

    Raises:
        CheckpointError: as `load_checkpoint`, or no MTP layer, or another target's.
        ArgumentError: `dtype` is not a floating type.
    """
    found, config = read_config(directory), target.config
    differ = [
        f"{name} is {got}, the target's is {wanted}"
        for name in ("attention", "moe", "vocab_size", "num_layers")
        if (got := getattr(found, name)) != (wanted := getattr(config, name))
    ]
    if differ:
        raise CheckpointError(f"{directory}: config.json: " + "; ".join(differ))
    if found.num_mtp_layers < 1:
        raise CheckpointError(
            f"{directory}: num_nextn_predict_layers is {found.num_mtp_layers}, accepted are 1 "
            "or more"
        )
    weight = target.model.embed_tokens.weight
    return load_part(
        lambda: MTPModule(found),
        directory,
        f"model.layers.{config.num_layers}.",
        shared=_SHARED,
        device=weight.device,
        dtype=dtype or weight.dtype,
    )
