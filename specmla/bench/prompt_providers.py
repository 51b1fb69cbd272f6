"""Kernels for prompts, ours and others', behind one face: up-projected MHA, values narrower than
keys, causal from the last key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specmla.backends.fa3_prompts import FA3Prompts
from specmla.backends.prompt_kernel import PromptKernel
from specmla.backends.running import RunningSoftmax
from specmla.backends.sdpa_prompts import SdpaPrompts
from specmla.backends.select import get_backend
from specmla.bench.fa3 import FA3Provider
from specmla.errors import ArgumentError
from specmla.metadata import PrefillPart


@dataclass(frozen=True)
class Prompts:
    """Prompts without cached context, packed: rows and keys are the same tokens.

    Attributes:
        query: [T, H, D]. key: [T, H, D]. value: [T, H, V].
        part: their starts.
        scale: D^-0.5.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    part: PrefillPart
    scale: float

    @property
    def is_uniform(self) -> bool:
        """Whether all prompts have one length."""
        return len(set(self.part.query_lens)) == 1


class PromptProvider(Protocol):
    """One implementation; on a GPU, `run` is captured in a CUDA graph."""

    def problems(self, prompts: Prompts) -> list[str]:
        """List why it can't be run; what only a run can tell is raised by it."""
        ...

    def run(self, prompts: Prompts) -> Tensor:
        """Give [T, H, V]."""
        ...


class BackendPrompts:
    """`forward_mha` of a backend of the library."""

    def __init__(self, name: str) -> None:
        self.backend = get_backend(name)

    def problems(self, prompts: Prompts) -> list[str]:
        """Ask the backend what it says of this machine."""
        found = self.backend.unavailable()
        kind = prompts.query.device.type
        if kind not in self.backend.capabilities.device_types:
            accepted = list(self.backend.capabilities.device_types)
            found.append(f"device is {kind!r}, accepted are {accepted}")
        return found

    def run(self, prompts: Prompts) -> Tensor:
        """Attend."""
        return self.backend.forward_mha(
            prompts.query,
            prompts.key,
            prompts.value,
            prompts.part,
            softmax_scale=prompts.scale,
        ).out


class FoldedPrompts(BackendPrompts):
    """`fold_mha` of a backend, all keys at once: the prompt kernel of batch-invariant results."""

    def run(self, prompts: Prompts) -> Tensor:
        """Attend."""
        part, query, value = prompts.part, prompts.query, prompts.value
        extents = torch.ones_like(part.query_start[1:])  # there is no context before the first row
        state = RunningSoftmax.start(query, value.shape[2])
        folded = replace(part, first_extent=extents)
        self.backend.fold_mha(state, query, prompts.key, value, folded, softmax_scale=prompts.scale)
        return state.finish(query.dtype)[0]


class PlainSdpa:
    """torch's scaled dot product attention by one of its backends.

    Args:
        backend: which; None leaves the choice to torch.
        pads_value: widen V to D with zeros, for backends that know one width alone.
    """

    def __init__(self, backend: SDPBackend | None, *, pads_value: bool) -> None:
        self.backend, self.pads_value = backend, pads_value

    def problems(self, prompts: Prompts) -> list[str]:
        """It has no ragged batches."""
        lens = sorted(set(prompts.part.query_lens))
        return [] if prompts.is_uniform else [f"query_lens are {lens}, accepted is one length"]

    def run(self, prompts: Prompts) -> Tensor:
        """Attend, on views of the packed rows."""
        shape = (len(prompts.part.query_lens), prompts.part.query_lens[0])
        width = prompts.value.shape[-1]
        value = prompts.value
        if self.pads_value:
            value = torch.nn.functional.pad(value, (0, prompts.query.shape[-1] - width))
        query, key, value = (
            t.unflatten(0, shape).transpose(1, 2) for t in (prompts.query, prompts.key, value)
        )
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention,
            query,
            key,
            value,
            is_causal=True,
            scale=prompts.scale,
        )
        if self.backend is None:
            out = attend()
        else:
            with sdpa_kernel(self.backend):
                out = attend()
        return out.transpose(1, 2).flatten(0, 1)[..., :width]


class KernelPrompts:
    """A kernel of `specmla.backends.with_prompts`: with an LSE, which the others leave out.

    Args:
        kernel: attends.
    """

    def __init__(self, kernel: PromptKernel) -> None:
        self.kernel = kernel

    def problems(self, prompts: Prompts) -> list[str]:
        """Ask the kernel what it says of this machine."""
        return self.kernel.problems(prompts.query.device, prompts.query.dtype)

    def run(self, prompts: Prompts) -> Tensor:
        """Attend packed rows."""
        return self.kernel.attend(
            prompts.query,
            prompts.key,
            prompts.value,
            prompts.part,
            softmax_scale=prompts.scale,
            causal=True,
        ).out


def _fa3(file: Path | None) -> KernelPrompts:
    kernel = FA3Prompts()
    kernel.library = FA3Provider(file).library  # named after the command's option
    return KernelPrompts(kernel)


PROVIDERS: dict[str, Callable[[Path | None], PromptProvider]] = {
    "triton": lambda file: BackendPrompts("triton"),
    "triton-folded": lambda file: FoldedPrompts("triton"),
    "reference": lambda file: BackendPrompts("reference"),
    "sdpa": lambda file: PlainSdpa(None, pads_value=False),
    "flash": lambda file: PlainSdpa(SDPBackend.FLASH_ATTENTION, pads_value=True),
    "cudnn": lambda file: PlainSdpa(SDPBackend.CUDNN_ATTENTION, pads_value=False),
    "flash-lse": lambda file: KernelPrompts(SdpaPrompts("flash")),
    "cudnn-lse": lambda file: KernelPrompts(SdpaPrompts("cudnn")),
    "fa3": _fa3,
}
"""sdpa: whatever torch takes. flash: its FlashAttention-2, V padded. cudnn: unpadded. Those with an
LSE are what `WithPrompts` takes, ragged batches one request after another."""


def get_prompt_provider(name: str, fa3: Path | None = None) -> PromptProvider:
    """Make the provider of that name.

    Raises:
        ArgumentError: an unknown name.
    """
    if name not in PROVIDERS:
        raise ArgumentError(f"provider is {name!r}, accepted are {sorted(PROVIDERS)}")
    return PROVIDERS[name](fa3)
