"""The drafters that need no model, by the names that the commands take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from drafters import NgramDrafter, SuffixDrafter
from specmla.verify.proposal import Drafter

LOOKUPS: Mapping[str, Callable[[int], Drafter]] = MappingProxyType(
    {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "suffix-tree": lambda vocab_size: SuffixDrafter(vocab_size, tree=True),
    }
)
"""Makes each for a target's vocabulary size."""
