"""Tells text that goes on from text that loops: a loop flatters every drafter."""

from __future__ import annotations

from collections.abc import Sequence


def distinct_ngram_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Share of distinct n-grams among all n-grams; 1.0 where there is none.

    A continuation that repeats a short phrase falls towards 0. The measure is distinct-n of Li et
    al. 2016 (arXiv 1510.03055), over tokens of one continuation.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
