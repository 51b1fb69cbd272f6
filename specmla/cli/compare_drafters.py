"""The drafters of a comparison, by name or directory."""

from __future__ import annotations

from pathlib import Path

from specmla.bench.compare_run import Contender, RunSettings
from specmla.cli.lookup import LOOKUPS
from specmla.cli.named import SHIPPED, TREE, folder_of, is_known, is_tree, make_named
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
    for word, label in zip(_words(names), labels_of(names), strict=True):
        make = make_named(
            word, target, num_requests=settings.batch, longest=longest, backend=settings.backend
        )
        made[label] = (make, is_tree(word))
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
    if len(set(labels_of(names))) < len(words):
        found.append(f"draft is {names!r}, accepted are different names, and directories of")
    return found


def _words(names: str) -> list[str]:
    return [word.strip() for word in names.split(",")]


def labels_of(names: str) -> list[str]:
    """Give what each name is called in the results: of a directory its last part, or its last two
    where that is what another drafter is called."""
    words = _words(names)
    folders: dict[str, set[Path]] = {}
    for word in words:
        folders.setdefault(_bare(word), set()).add(_place(word))
    return [
        "/".join(_place(word).parts[-2:]) + TREE * is_tree(word)
        if word.removesuffix(TREE) not in {*LOOKUPS, *SHIPPED} and len(folders[_bare(word)]) > 1
        else Path(word).name
        for word in words
    ]


def _bare(word: str) -> str:
    """Give a word's last part, without what stands for trees."""
    name = Path(word).name
    return name.removesuffix(TREE) if word not in LOOKUPS and is_tree(word) else name


def _place(word: str) -> Path:
    return Path(word) if word in LOOKUPS else folder_of(word).absolute()
