"""Row formats by name, and the names of those that there are not."""

from __future__ import annotations

import torch

from specmla.cache.formats.base import CacheFormat, largest_scale, scale_problems
from specmla.cache.formats.fp8 import Fp8Format
from specmla.cache.formats.fp8_ds_mla import Fp8DsMlaFormat
from specmla.cache.formats.fp8_per_token_head import Fp8PerTokenHeadFormat
from specmla.cache.formats.nvfp4_ds_mla import Nvfp4DsMlaFormat
from specmla.cache.formats.plain import PLAIN_NAMES, PlainFormat
from specmla.errors import ArgumentError, require

SCALED: dict[str, type[Fp8Format] | type[Nvfp4DsMlaFormat]] = {
    "fp8": Fp8Format,
    "nvfp4_ds_mla": Nvfp4DsMlaFormat,
}
"""Formats with a scale for all rows."""

SELF_SCALED: dict[str, type[CacheFormat]] = {
    "fp8_ds_mla": Fp8DsMlaFormat,
    "fp8_per_token_head": Fp8PerTokenHeadFormat,
}
"""Formats whose rows carry their scales."""

QUANTISED_NAMES = (*SCALED, *SELF_SCALED)
"""Every format that is not plain."""

_E5M2 = "e5m2 keeps two mantissa bits and is not served, accepted is 'fp8' (e4m3)"

REFUSED = {
    "e5m2": _E5M2,
    "fp8_e5m2": _E5M2,
    "mxfp8_ds_mla": "rows of 528 bytes (MXFP8) are not served, accepted is 'fp8_ds_mla' (656)",
    "nvfp4": "rows of 288 bytes (NVFP4) are not served, accepted is 'nvfp4_ds_mla' (352)",
}
"""Formats that others have and that are refused, with the reason."""

REFUSED_ROW_BYTES = {528: REFUSED["mxfp8_ds_mla"], 288: REFUSED["nvfp4"]}
"""Rows of bytes that are known and refused, by their size for DeepSeek."""


def cache_format(
    name: str,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    dtype: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float | None = None,
) -> CacheFormat:
    """Make the row format of that name.

    Args:
        name: "bf16", "fp16", "fp32", "fp64" (plain), "fp8", "fp8_ds_mla", "fp8_per_token_head" or
            "nvfp4_ds_mla".
        kv_lora_rank: C. qk_rope_head_dim: R.
        dtype: that rows are stored from and gathered to; None means bfloat16, or a plain format's
            own.
        k_scale: of "fp8" and "nvfp4_ds_mla". A plain cache isn't scaled: a checkpoint's scale is
            checked and has no effect. Formats whose rows carry scales accept 1 only.
        v_scale: None or the same value.

    Raises:
        ArgumentError: an unknown or refused name, dims, dtype or scales that can't be accepted; all
            reasons are listed.
    """
    known = [*PLAIN_NAMES, *QUANTISED_NAMES]
    if name not in known:
        require(
            [REFUSED.get(name, f"name is {name!r}, accepted are {known}")],
            f"cache_format {name!r}",
        )
    if name in SCALED:
        dims = kv_lora_rank, qk_rope_head_dim
        return SCALED[name](*dims, dtype or torch.bfloat16, k_scale, v_scale)
    found = scale_problems(k_scale, v_scale, largest_scale(torch.float32, 1.0))
    if name in SELF_SCALED and not found and k_scale != 1.0:
        found.append(f"k_scale is {k_scale}, accepted is 1: the rows carry their own scales")
    if name in PLAIN_NAMES and dtype not in (None, PLAIN_NAMES[name]):
        found.append(f"dtype is {dtype}, accepted is {PLAIN_NAMES[name]}, or None")
    built, usual = SELF_SCALED.get(name, PlainFormat), PLAIN_NAMES.get(name, torch.bfloat16)
    try:
        made = built(kv_lora_rank, qk_rope_head_dim, dtype or usual)
    except ArgumentError as error:
        found.append(str(error))
    require(found, f"cache_format {name!r}")
    return made
