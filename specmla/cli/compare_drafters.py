"""The drafters of a comparison, by name or directory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from specmla.bench.compare_run import Contender, MakeDrafter, RunSettings
from specmla.cli.drafts import drafter_from
from specmla.cli.lookup import LOOKUPS
from specmla.errors import require
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.proposal import Drafter
from specmla.verify.step import VerifyStep

SHIPPED = Path(str(files("specmla"))) / "assets"
TREE = "-tree"


def contenders_of(
    names: str, target: DeepseekForCausalLM, settings: RunSettings, longest: int
) -> list[Contender]:
    """Load the drafters named, by commas.

    A name is one of `LOOKUPS`, `draft_model` (the shipped one) or a directory; behind a directory
    or `draft_model`, `-tree` stands for trees. A directory that ends so itself is meant as it is.

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
    words = _words(names)
    made = {}
    for word in words:
        made[_label(word)] = (_maker(word, target, settings, longest), _is_tree(word))
    return [
        Contender(label, make, tree, chain=label.removesuffix(TREE) if tree else None)
        for label, (make, tree) in made.items()
    ]


def draft_problems(names: str) -> list[str]:
    """List the names that are of nothing, and whether one stands twice; nothing is loaded."""
    words = _words(names)
    found = [
        f"draft has {word!r}, accepted are {', '.join(LOOKUPS)}, draft_model and directories, "
        f"the last two also with {TREE} behind them"
        for word in words
        if word not in LOOKUPS and not (_bare(word) and _folder(word).is_dir())
    ]
    if len(set(map(_label, words))) < len(words):
        found.append(f"draft is {names!r}, accepted are different names, and directories of")
    return found


def _words(names: str) -> list[str]:
    return [word.strip() for word in names.split(",")]


def _label(word: str) -> str:
    return word if word in LOOKUPS else Path(word).name


def _bare(word: str) -> str:
    return word.removesuffix(TREE) if _is_tree(word) else word


def _folder(word: str) -> Path:
    bare = _bare(word)
    return SHIPPED / "draft" if bare == "draft_model" else Path(bare)


def _is_tree(word: str) -> bool:
    return word.endswith(TREE) and not Path(word).is_dir()


def _maker(
    word: str, target: DeepseekForCausalLM, settings: RunSettings, longest: int
) -> MakeDrafter:
    if word in LOOKUPS:
        return _lookup(LOOKUPS[word], target.config.vocab_size)
    return drafter_from(
        _folder(word),
        target,
        num_requests=settings.batch,
        longest=longest,
        backend=settings.backend,
        tree=_is_tree(word),
    )


def _lookup(make: Callable[[int], Drafter], vocab_size: int) -> MakeDrafter:
    def made(step: VerifyStep) -> Drafter:
        return make(vocab_size)

    return made
