"""Prompts of the evaluation: excerpts of held-out files, from the start of a line on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from pairtrain.source import SourceFile

LENGTHS = (32, 64, 96, 160)  # tokens, in turn
EXCERPT = 4000  # bytes that are tokenised for a prompt


def held_out_prompts(
    files: Sequence[SourceFile], tokenizer: Tokenizer, count: int, seed: int
) -> list[list[int]]:
    """Cut `count` prompts from `files`, the modules in turn, so that no large one dominates."""
    chance = random.Random(seed)
    modules: dict[str, list[SourceFile]] = {}
    for file in files:
        modules.setdefault(file.module, []).append(file)
    if not modules:
        raise ValueError("files: no held-out files; raise --held-out-percent or give more roots")
    names = sorted(modules)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        module = names[len(prompts) % len(names)]
        text = chance.choice(modules[module]).text
        lines = text.splitlines(keepends=True)
        first = chance.randrange(max(len(lines) - 10, 1))
        excerpt = "".join(lines[first:])[:EXCERPT]
        ids = tokenizer.encode(excerpt).ids[: LENGTHS[len(prompts) % len(LENGTHS)]]
        if ids:
            prompts.append(ids)
    return prompts
