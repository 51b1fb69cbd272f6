"""How heads of any width fit the blocks of the prompt kernels, which are powers of two."""

from __future__ import annotations

from torch import Tensor

from specmla.kernels.launch import LaunchEntry, describe_device, find_entry
from specmla.prompt_keys import PromptKeys

MIN_DOT = 16
"""Least width that a dot takes."""


def key_parts(width: int) -> tuple[int, int]:
    """Cut a key width into a power of two and a rest (padded to one), both fit for a dot."""
    main = max(MIN_DOT, 1 << (width.bit_length() - 1))
    rest = width - main
    return main, 0 if rest <= 0 else max(MIN_DOT, 1 << (rest - 1).bit_length())


def value_pad(width: int) -> int:
    """Pad a value width to a power of two fit for a dot."""
    return max(MIN_DOT, 1 << (width - 1).bit_length())


def attendable(keys: PromptKeys) -> PromptKeys:
    """Join keys that the kernel can't read apart: their own part is no power of two fit for a dot.

    A width P is one block of the kernel then, the rotated part the other one.
    """
    if keys.rope is None:
        return keys
    nope, rope = keys.key.shape[2], keys.rope.shape[1]
    if rope and nope >= MIN_DOT and not nope & (nope - 1):
        return keys
    return PromptKeys(keys.joined(), None, keys.value)


def find_prefill_entry(query: Tensor, value: Tensor, kernel: str = "prefill") -> LaunchEntry:
    """Give the launch entry for the widths of `query` [T, H, D] and `value` [sum of S, H, V].

    The table's buckets of `kernel` ("prefill" or "fold") are widths (the larger of the two), not
    row counts.
    """
    width = max(query.shape[2], value.shape[2])
    return find_entry(kernel, describe_device(query.device).arch, width, query.element_size())
