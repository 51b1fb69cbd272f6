"""Compares speculative with plain greedy output: where they part, and how close the call was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specmla.models.deepseek import DeepseekForCausalLM


@dataclass(frozen=True)
class FirstDifference:
    """Where two greedy continuations part.

    Attributes:
        prompt: which one.
        position: index of the token in the sequence, prompt included.
        top1_margin: gap between the two best logits there, from one full pass.
    """

    prompt: int
    position: int
    top1_margin: float


@torch.no_grad()
def first_difference(
    model: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
) -> FirstDifference | None:
    """Find the widest gap among the first differences of all prompts; None if all are equal."""
    worst: FirstDifference | None = None
    for i, (prompt, a, b) in enumerate(zip(prompts, plain, other, strict=True)):
        if list(a) == list(b):
            continue
        shared = next(
            (j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        tokens = torch.tensor([*prompt, *a[:shared]], device=model.model.embed_tokens.weight.device)
        top = model.forward_full(tokens[None])[0, -1].float().topk(2).values
        here = FirstDifference(i, len(tokens), float(top[0] - top[1]))
        if worst is None or here.top1_margin > worst.top1_margin:
            worst = here
    return worst
