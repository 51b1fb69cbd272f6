"""A backend whose prompts go through another kernel than its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.backends.fa3_prompts import FA3Prompts
from specmla.backends.prompt_kernel import PromptKernel
from specmla.backends.reference_inputs import mha_problems
from specmla.backends.sdpa_prompts import KINDS, SdpaPrompts
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.errors import require
from specmla.metadata import PrefillPart, VerifyPart

NAMES = (*KINDS, FA3Prompts.name)


def get_prompt_kernel(name: str, library: Path | str | None = None) -> PromptKernel:
    """Make the kernel of that name, whether or not it can run here.

    Args:
        name: "sdpa" (torch's on a CPU), "flash", "cudnn" (torch's on a GPU) or "fa3".
        library: operator library of "fa3"; None looks for an installed one.

    Raises:
        ArgumentError: an unknown name, or a library for one that needs none.
    """
    found = [] if name in NAMES else [f"name is {name!r}, accepted are {list(NAMES)}"]
    if library is not None and name != FA3Prompts.name:
        found.append(f"library is {str(library)!r}, accepted for {name!r} is None")
    require(found, "get_prompt_kernel")
    return FA3Prompts(library) if name == FA3Prompts.name else SdpaPrompts(name)


class WithPrompts(AttentionBackend):
    """Gives verifies to a backend and prompts to a kernel.

    What the backend declares stays; batch-invariant prompts stay its own.

    Args:
        backend: attends verifies.
        prompts: attends prompts: a kernel or the name of one, see `get_prompt_kernel`.
    """

    def __init__(self, backend: AttentionBackend, prompts: PromptKernel | str) -> None:
        self.backend = backend
        self.prompts = get_prompt_kernel(prompts) if isinstance(prompts, str) else prompts
        has = backend.capabilities
        self.capabilities = dataclasses.replace(
            has,
            name=f"{has.name}-{self.prompts.name}",
            summary=f"{has.name}, prompts by {self.prompts.name}",
        )
        self.batch_invariant, self.folds_prompts = backend.batch_invariant, backend.folds_prompts
        self.cache_format, self.query_form = backend.cache_format, backend.query_form

    def unavailable(self) -> list[str]:
        """Ask the backend."""
        return self.backend.unavailable()

    def problems(self, need: Requirements) -> list[str]:
        """List what is in the way of either."""
        found = self.prompts.problems(need.device, need.dtype)
        return self.backend.problems(need) + [f"prompts: {text}" for text in found]

    def declared_problems(self, need: Requirements) -> list[str]:
        """List what holds on any machine."""
        return self.backend.declared_problems(need)

    def plan(self, part: VerifyPart, **sizes: Any) -> VerifyPart:
        """Let the backend plan, see `AttentionBackend.plan`."""
        return self.backend.plan(part, **sizes)

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what the backend's plan reserves."""
        return self.backend.scratch(size)

    def forward_mqa(self, *given: Any, **scale: Any) -> AttentionOutput:
        """Attend verifies, see `AttentionBackend.forward_mqa`."""
        return self.backend.forward_mqa(*given, **scale)

    def forward_mha(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend prompts by the kernel; see `AttentionBackend.forward_mha`.

        Raises:
            ArgumentError: shapes, dtypes or a device that can't be taken; all are listed.
        """
        found = mha_problems(query, key, value, part)
        found += self.prompts.problems(query.device, query.dtype)
        require(found, f"{type(self).__name__}.forward_mha")
        return self.prompts.attend(
            query, key, value, part, softmax_scale=softmax_scale, causal=causal
        )

    def merge_states(self, held: AttentionOutput, got: AttentionOutput) -> None:
        """Merge as the backend does."""
        self.backend.merge_states(held, got)

    def fold_mha(self, *given: Any, **scale: Any) -> None:
        """Carry prompt rows on, see `AttentionBackend.fold_mha`."""
        self.backend.fold_mha(*given, **scale)
