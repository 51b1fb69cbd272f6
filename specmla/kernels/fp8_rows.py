"""Where codes and scales of a quantised cache row lie, as the kernels are told."""

from __future__ import annotations

from typing import NamedTuple


class Fp8Rows(NamedTuple):
    """Where codes and scales of a row lie.

    codes: leading numbers of a row that are e4m3; those after them are bf16. group: codes that
    share a scale in the row, 0 for one scale of all rows. scales_at: float32 that lie before the
    first scale. copies: of each scale. rope_at: bf16 numbers that lie before the rotated key, where
    that is not codes. scale: of all rows.
    """

    codes: int
    group: int = 0
    scales_at: int = 0
    copies: int = 1
    rope_at: int = 0
    scale: float = 1.0
