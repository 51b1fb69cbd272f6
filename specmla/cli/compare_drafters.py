"""The drafters of a comparison, by name or directory."""

from __future__ import annotations

from pathlib import Path

from specmla.bench.compare_run import Contender, RunSettings
from specmla.cli.lookup import LOOKUPS
from specmla.cli.named import SHIPPED, TREE, is_known, is_tree, make_named
from specmla.errors import require
from specmla.models.deepseek import DeepseekForCausalLM


def contenders_of(
    names: str, target: DeepseekForCausalLM, settings: RunSettings, longest: int
) -> list[Contender]:
    """Load the drafters named, by commas.

    A name is one of `LOOKUPS`, one of `SHIPPED` or a directory; behind the last two, `-tree` stands
    for trees. A directory that ends so itself is meant as it is.

    Args:
        names: as given.
        target: that they draft for.
        settings: of the runs.
        longest: tokens of a request, drafts included.

    Raises:
        ArgumentError: a name of nothing, or one twice.
        CheckpointError: a directory that can't be served with this target.
    """
    require(draft_problems(names), "compare")
    made = {}
    for word in _words(names):
        make = make_named(
            word, target, num_requests=settings.batch, longest=longest, backend=settings.backend
        )
        made[_label(word)] = (make, is_tree(word))
    return [
        Contender(label, make, tree, chain=label.removesuffix(TREE) if tree else None)
        for label, (make, tree) in made.items()
    ]


def draft_problems(names: str) -> list[str]:
    """List the names that are of nothing, and whether one stands twice; nothing is loaded."""
    words = _words(names)
    found = [
        f"draft has {word!r}, accepted are {', '.join([*LOOKUPS, *SHIPPED])} and directories, "
        f"the last {len(SHIPPED) + 1} also with {TREE} behind them"
        for word in words
        if not is_known(word)
    ]
    if len(set(map(_label, words))) < len(words):
        found.append(f"draft is {names!r}, accepted are different names, and directories of")
    return found


def _words(names: str) -> list[str]:
    return [word.strip() for word in names.split(",")]


def _label(word: str) -> str:
    return word if word in LOOKUPS else Path(word).name
