"""Changes of attention scores that some models make and that no path here computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOFT_CAPS = ("logits_soft_cap", "attn_logit_softcapping", "attn_logit_softcap")
"""Names of a soft cap of scores in configs."""


def score_problems(
    *, alibi: object, sliding_window: object, logits_soft_cap: object, sinks: object
) -> list[str]:
    """List what of these is asked for: none of them is served, and none is left out silently.

    Args:
        alibi: slopes by distance, or whether there are any.
        sliding_window: keys a row sees, None for all.
        logits_soft_cap: largest score, None or 0 for none.
        sinks: logits that take a share of the softmax, or whether there are any.
    """
    found = []
    if _is_given(alibi):
        found.append(f"alibi is {alibi!r}, accepted is none: positions are rotated in")
    if sliding_window is not None:
        found.append(f"sliding_window is {sliding_window!r}, accepted is None: rows see all keys")
    if _is_given(logits_soft_cap):
        found.append(f"logits_soft_cap is {logits_soft_cap!r}, accepted is None: scores are linear")
    if _is_given(sinks):
        found.append(f"sinks is {sinks!r}, accepted is none: a softmax is over keys alone")
    return found


def config_problems(source: Mapping[str, Any] | object) -> list[str]:
    """List what a Hugging Face config asks for; a window that it switches off is none."""

    def read(name: str) -> Any:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)

    window = read("sliding_window") if read("use_sliding_window") is not False else None
    caps = [cap for cap in map(read, SOFT_CAPS) if _is_given(cap)]
    return score_problems(
        alibi=read("alibi"),
        sliding_window=window,
        logits_soft_cap=caps[0] if caps else None,
        sinks=read("attention_sinks"),
    )


def _is_given(value: object) -> bool:
    return not (value is None or (isinstance(value, bool | int | float) and not value))
