"""The drafters of a comparison, by name or directory."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from specmla.bench.compare_run import Contender, MakeDrafter, RunSettings
from specmla.cli.drafts import drafter_from
from specmla.cli.lookup import LOOKUPS
from specmla.errors import ArgumentError
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
    words = [word.strip() for word in names.split(",")]
    labels = [word if word in LOOKUPS else Path(word).name for word in words]
    if len(set(labels)) < len(labels):
        raise ArgumentError(f"draft is {names!r}, accepted are different names, and directories of")
    made = {}
    for word, label in zip(words, labels, strict=True):
        made[label] = (_maker(word, target, settings, longest), _is_tree(word))
    return [
        Contender(label, make, tree, chain=label.removesuffix(TREE) if tree else None)
        for label, (make, tree) in made.items()
    ]


def _is_tree(word: str) -> bool:
    return word.endswith(TREE) and not Path(word).is_dir()


def _maker(
    word: str, target: DeepseekForCausalLM, settings: RunSettings, longest: int
) -> MakeDrafter:
    if word in LOOKUPS:
        return _lookup(LOOKUPS[word], target.config.vocab_size)
    tree = _is_tree(word)
    bare = word.removesuffix(TREE) if tree else word
    folder = SHIPPED / "draft" if bare == "draft_model" else Path(bare)
    if not folder.is_dir():
        raise ArgumentError(
            f"draft has {word!r}, accepted are {', '.join(LOOKUPS)}, draft_model and directories, "
            f"the last two also with {TREE} behind them"
        )
    return drafter_from(
        folder,
        target,
        num_requests=settings.batch,
        longest=longest,
        backend=settings.backend,
        tree=tree,
    )


def _lookup(make: Callable[[int], Drafter], vocab_size: int) -> MakeDrafter:
    def made(step: VerifyStep) -> Drafter:
        return make(vocab_size)

    return made
