"""What the providers of other projects' kernels share; see `specmla.backends.peer_library`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specmla.backends.base import Requirements
from specmla.backends.peer_library import PeerLibrary as PeerLibrary
from specmla.mask import DraftMask

MASKS = frozenset({DraftMask.CAUSAL, DraftMask.FULL})
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class PeerFiles:
    """The libraries named on the command line; None: look for an installed package."""

    flashmla: Path | None = None
    fa3: Path | None = None


def lse_or_nan(lse: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give an LSE of the shape its library documents, else NaN: the check then notes it."""
    return lse if lse.shape == shape else lse.new_full(shape, float("nan"))


def shape_problems(
    need: Requirements, *, page_sizes: str, serves_page: bool, devices: Iterable[str] = ("cuda",)
) -> list[str]:
    """List what both peers can't serve of `need`: they are built for one model family on sm_90."""
    found = []
    if need.device.type not in devices:
        found.append(f"device is {need.device.type!r}, accepted are {list(devices)}")
    elif need.device.type == "cuda":
        got = torch.cuda.get_device_capability(need.device)
        if got != CAPABILITY:
            found.append(f"compute capability is {got[0]}.{got[1]}, accepted is 9.0")
    if need.dtype not in DTYPES:
        found.append(f"dtype is {need.dtype}, accepted are {[str(d) for d in DTYPES]}")
    if (need.kv_lora_rank, need.qk_rope_head_dim) != (512, 64):
        found.append(
            f"kv_lora_rank and qk_rope_head_dim are {need.kv_lora_rank} and "
            f"{need.qk_rope_head_dim}, accepted are 512 and 64"
        )
    if not serves_page:
        found.append(f"page_size is {need.page_size}, accepted are {page_sizes}")
    missing = sorted(mask.value for mask in need.masks - MASKS)
    if missing:
        found.append(f"masks {missing} are not served, accepted are ['causal', 'full']")
    return found
