"""Prompts by torch's own scaled dot product attention, by the operators that give an LSE."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.backends.prompt_kernel import attend_blocks
from specmla.errors import ArgumentError
from specmla.metadata import PrefillPart

HALVES = (torch.bfloat16, torch.float16)
KINDS: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "sdpa": ("cpu", (torch.float32, torch.float64)),
    "flash": ("cuda", HALVES),
    "cudnn": ("cuda", HALVES),
}
"""Device and dtypes of each: the CPU's flash kernel, FlashAttention-2, and cuDNN's. The CPU's has a
coarser exponential for halves, of which the LSE is off by 2e-5."""

OPERATORS: Any = torch.ops.aten

FLASH_WIDTHS = 8
"""Head widths of FlashAttention-2 are multiples of this."""


class SdpaPrompts:
    """Attends prompts by one of torch's kernels.

    Requests of one shape go in one call, ragged ones one after another. All but cuDNN's know one
    head width alone: the narrower of keys and values is filled up with zeros, which changes
    neither a score nor the LSE.

    Args:
        kind: one of `KINDS`.

    Raises:
        ArgumentError: another kind.
    """

    def __init__(self, kind: str = "sdpa") -> None:
        if kind not in KINDS:
            raise ArgumentError(f"SdpaPrompts: kind is {kind!r}, accepted are {list(KINDS)}")
        self.name = kind

    def problems(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        """List what of device and dtype it does not serve."""
        home, dtypes = KINDS[self.name]
        found = []
        if device.type != home:
            found.append(f"device is {device.type!r}, accepted by {self.name!r} is {home!r}")
        if dtype not in dtypes:
            found.append(
                f"dtype is {dtype}, accepted by {self.name!r} are {[str(d) for d in dtypes]}"
            )
        return found

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> AttentionOutput:
        """Attend, see `PromptKernel.attend`."""
        square = partial(self._square, softmax_scale)
        return attend_blocks(square, query, key, value, part, causal=causal)

    def _square(
        self, scale: float, query: Tensor, key: Tensor, value: Tensor, causal: bool
    ) -> AttentionOutput:
        width = value.shape[3]
        if self.name != "cudnn":
            query, key, value = _one_width(query, key, value, self.name == "flash")
        given = [t.transpose(1, 2) for t in (query, key, value)]
        out, lse = _call(self.name, given, scale, causal)
        rows = out.transpose(1, 2)[..., :width]
        # cuDNN's LSE has a last dimension of 1.
        return AttentionOutput(rows, lse.reshape(out.shape[:3]).transpose(1, 2))


def _call(name: str, given: list[Tensor], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Call the operator on [B, H, Q, D], [B, H, S, D] and [B, H, S, V]; out and LSE come first."""
    if name == "sdpa":
        got = OPERATORS._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, causal, scale=scale
        )
    elif name == "flash":
        got = OPERATORS._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)
    else:
        got = OPERATORS._scaled_dot_product_cudnn_attention(
            *given, None, True, 0.0, causal, False, scale=scale
        )
    return got[0], got[1]


def _one_width(query: Tensor, key: Tensor, value: Tensor, whole: bool) -> list[Tensor]:
    """Fill all up with zeros to the widest of them, and to whole multiples if asked for."""
    width = max(query.shape[-1], value.shape[-1])
    if whole:
        width += -width % FLASH_WIDTHS
    pad = torch.nn.functional.pad
    return [
        t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1])) for t in (query, key, value)
    ]
