"""Prompts by FlashAttention-3, in vLLM's build of it, if its library was given or is installed.

Its operator `fwd` takes packed rows [T, H, D], keys [sum of S, H, D] and values [sum of S, H, V],
starts as int32, aligns a causal mask bottom right, and gives out [T, H, V] and LSE [H, T].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.backends.peer_library import PeerLibrary
from specmla.errors import UnsupportedError
from specmla.metadata import PrefillPart

CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)

UNUSED = dict.fromkeys(
    [
        "k_new",
        "v_new",
        "q_v",
        "out",
        "cu_seqlens_k_new",
        "seqused_q",
        "seqused_k",
        "page_table",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
        "q_descale",
        "k_descale",
        "v_descale",
        "scheduler_metadata",
        "pack_gqa",
        "s_aux",
        "cp_tot_seqused_k",
    ]
)
"""Arguments for what this attention does not have; the operator has no defaults."""

PLAIN: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "num_splits": 1,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


class FA3Prompts:
    """Attends prompts by FlashAttention-3; sm_90 only.

    Args:
        library: its operator library; None looks for the one that vLLM installs. It is loaded when
            first used, never imported.
    """

    name = "fa3"

    def __init__(self, library: Path | str | None = None) -> None:
        self.library = PeerLibrary(
            option="library",
            package="vllm",
            member="vllm_flash_attn/_vllm_fa3_C.abi3.so",
            namespace="_vllm_fa3_C",
            file=None if library is None else Path(library),
        )

    def problems(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        """List what is in the way; the library is loaded only where nothing else is."""
        found = []
        if device.type != "cuda":
            found.append(f"device is {device.type!r}, accepted by 'fa3' is 'cuda'")
        elif torch.cuda.is_available():
            got = torch.cuda.get_device_capability(device)
            if got != CAPABILITY:
                found.append(f"compute capability is {got[0]}.{got[1]}, accepted by 'fa3' is 9.0")
        if dtype not in DTYPES:
            found.append(f"dtype is {dtype}, accepted by 'fa3' are {[str(d) for d in DTYPES]}")
        return self.library.absent() + found if found else self.library.missing()

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
        """Attend, see `PromptKernel.attend`.

        Raises:
            UnsupportedError: there is no library, or its LSE has another shape.
        """
        if missing := self.library.missing():
            raise UnsupportedError("prompts by 'fa3'", missing)
        attend: Callable[..., list[Tensor]] = self.library.operator("fwd")
        given = {
            "q": query,
            "k": key,
            "v": value,
            "cu_seqlens_q": part.query_start,
            "cu_seqlens_k": part.kv_start,
            "max_seqlen_q": max(part.query_lens, default=0),
            "max_seqlen_k": max(part.seq_lens, default=0),
            "softmax_scale": softmax_scale,
            "is_causal": causal,
        }
        out, lse = attend(**UNUSED, **PLAIN, **given)[:2]
        if lse.shape != (query.shape[1], query.shape[0]):
            raise UnsupportedError(
                "prompts by 'fa3'", [f"its LSE is {tuple(lse.shape)}, accepted is [H, T]"]
            )
        return _empty_rows(out, lse.transpose(0, 1), part)


def _empty_rows(out: Tensor, lse: Tensor, part: PrefillPart) -> AttentionOutput:
    """Make rows of requests without keys the empty state, which the library gives otherwise."""
    if 0 not in part.seq_lens:
        return AttentionOutput(out, lse)
    starts = part.query_start.long()
    keys = (part.kv_start[1:] - part.kv_start[:-1]).long()
    rows = torch.arange(len(out), device=out.device)
    empty = keys[torch.searchsorted(starts[1:], rows, right=True)] == 0
    return AttentionOutput(
        out.masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty[:, None], -torch.inf)
    )
