"""A draft model as the network of captured rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from specmla import AttentionBackend, DeepseekForCausalLM, LatentCache, StepMetadata


class ModelRounds:
    """Runs a model on its own tokens, see `ChainNetwork`.

    Args:
        model: the draft model.
        cache: its own.
        backend: attends.
    """

    def __init__(
        self, model: DeepseekForCausalLM, cache: LatentCache, backend: AttentionBackend
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend

    def first(self, tokens: Tensor, states: Tensor | None, metadata: StepMetadata) -> Tensor:
        """Run rows [T]; ids that only the target knows can't be looked up, as in a first round."""
        return self._run(tokens.clamp(max=self._model.config.vocab_size - 1), metadata)

    def later(self, tokens: Tensor, out: Tensor, metadata: StepMetadata) -> Tensor:
        """Run the drafts [B] of the last round."""
        return self._run(tokens, metadata)

    def logits(self, out: Tensor) -> Tensor:
        """Map [B, D] to [B, W]."""
        return self._model.logits(out)

    def _run(self, tokens: Tensor, metadata: StepMetadata) -> Tensor:
        hidden: Tensor = self._model(tokens, metadata, self._cache, self._backend)
        return hidden
