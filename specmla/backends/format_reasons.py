"""Why a backend can't read caches in a row format, or queries as codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.query_form import Fp8Query


def name_reasons(format: CacheFormat | None, served: Sequence[str]) -> list[str]:
    """Report a quantised format that is not among the names `served`."""
    packed = quantised(format)
    if packed is None or packed.name in served:
        return []
    return [f"format is {packed.name!r}, accepted are {['plain rows', *served]}"]


def form_reasons(
    form: Fp8Query | None, format: CacheFormat | None, served: Sequence[str]
) -> list[str]:
    """Report e4m3 queries over rows that are not in one of the formats `served` with them."""
    packed = quantised(format)
    name = packed.name if packed else "plain rows"
    if form is None or name in served:
        return []
    accepted = f"one over {list(served)}, or None" if served else "None"
    return [f"query_form is {form} over {name!r}, accepted is {accepted}"]


class NeededFormat(Protocol):
    """Format of the caller's cache, C, R and dtype of its queries; `Requirements` is one."""

    @property
    def format(self) -> CacheFormat | None:
        """None for plain rows."""

    @property
    def kv_lora_rank(self) -> int:
        """C."""

    @property
    def qk_rope_head_dim(self) -> int:
        """R."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the queries."""


def format_reasons(
    need: NeededFormat, served: Sequence[str], built: CacheFormat | None
) -> list[str]:
    """List every reason why a backend can't read what a caller has.

    Args:
        need: what the caller has. served: names of quantised formats that the backend reads.
        built: the one it was built for.
    """
    format, found = need.format, name_reasons(need.format, served)
    if not found and quantised(format) != built:
        found.append(
            f"format is {quantised(format) or 'plain'}, accepted by this one is "
            f"{built or 'plain'}; build it with cache_format"
        )
    if format is not None:
        dims = need.kv_lora_rank, need.qk_rope_head_dim, need.dtype
        own = format.kv_lora_rank, format.qk_rope_head_dim, format.dtype
        if own != dims:
            found.append(f"format is for (C, R, dtype) = {own}, accepted is {dims}")
    return found
