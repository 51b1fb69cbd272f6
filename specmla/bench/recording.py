"""Recorded target states score a drafter offline: no forward pass of the target.

A recording holds texts that the target itself wrote, with its hidden states. To score a drafter,
`VerifyStep` walks along a text as if the target ran: drafts that equal the text are accepted, and
the states of committed rows are the recorded ones. Embedding, final norm and head of the target
are still used, by the drafter and for p.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specmla.errors import CheckpointError, require
from specmla.generate import build_step, generate
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.states import FINAL, StateCollector
from specmla.verify.proposal import Drafter
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep

PAGE = 64
MakeDrafter = Callable[[VerifyStep], Drafter]


@dataclass(frozen=True)
class Recording:
    """Texts of a target and its states on them.

    Attributes:
        tokens: [S] int64 of each text, prompt included.
        prompt_lens: tokens of each prompt.
        layers: whose states are recorded, `FINAL` among them.
        states: [S, m * D] of each text, the layers side by side in their order.
        temperature: at which the texts were sampled, 0 for greedy.
    """

    tokens: tuple[Tensor, ...]
    prompt_lens: tuple[int, ...]
    layers: tuple[int, ...]
    states: tuple[Tensor, ...]
    temperature: float

    def of_layers(self, text: int, layers: Sequence[int]) -> Tensor:
        """Give states [S, len(layers) * D] of one text.

        Raises:
            ArgumentError: a layer that was not recorded.
        """
        missing = [layer for layer in layers if layer not in self.layers]
        reason = f"layers {missing} are asked for, recorded are {list(self.layers)}"
        require([reason] if missing else [], "recording")
        parts = self.states[text].chunk(len(self.layers), dim=-1)
        return torch.cat([parts[self.layers.index(layer)] for layer in layers], dim=-1)

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        tensors = {f"tokens.{i}": part for i, part in enumerate(self.tokens)}
        tensors |= {f"states.{i}": part.contiguous() for i, part in enumerate(self.states)}
        about = {
            "prompt_lens": self.prompt_lens,
            "layers": self.layers,
            "temperature": self.temperature,
        }
        save_file(tensors, path, metadata={"specmla_recording": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            CheckpointError: another file.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["specmla_recording"])
                count = range(len(about["prompt_lens"]))
                tokens = tuple(file.get_tensor(f"tokens.{i}") for i in count)
                states = tuple(file.get_tensor(f"states.{i}") for i in count)
        except FileNotFoundError:
            raise
        except Exception as error:  # the library has its own exceptions for damaged files
            raise CheckpointError(f"{path} is no recording of target states: {error!r}") from error
        lens, layers = tuple(about["prompt_lens"]), tuple(about["layers"])
        return cls(tokens, lens, layers, states, about["temperature"])


@torch.no_grad()
def record(
    target: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    layers: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    seed: int = 0,
) -> Recording:
    """Let a target continue prompts plainly and keep its states.

    Args:
        target: the model.
        prompts: tokens of each.
        layers: that drafters ask for; `FINAL`, which p follows from, is added.
        max_tokens: new tokens of a text.
        temperature: 0 for greedy.
        seed: of the first text; the others follow.
    """
    layers = tuple(dict.fromkeys((*layers, FINAL)))
    pages = -(-(max(map(len, prompts)) + max_tokens) // PAGE) + 1
    # By this rule a text depends on its seed alone: a run with a drafter writes the same one.
    step = build_step(target, num_pages=pages, page_size=PAGE, rule="sample_match")
    device, tokens, states = step.builder.device, [], []
    for i, prompt in enumerate(prompts):
        ends = target.config.eos_token_ids
        sampling = SamplingParams(
            temperature, seed=seed + i, max_tokens=max_tokens, stop_token_ids=ends
        )
        new = [
            t for rs in generate(target, step, {i: (prompt, sampling)}) for t in rs[0].new_tokens
        ]
        text = torch.tensor([*prompt, *new], device=device)
        kept = StateCollector(layers, target.config.num_layers)
        target.model.forward_full(text[None], kept)
        tokens.append(text.cpu())
        states.append(kept.joined()[0].cpu())
    lens = tuple(map(len, prompts))
    return Recording(tuple(tokens), lens, layers, tuple(states), temperature)
