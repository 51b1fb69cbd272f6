"""Drafters by the names that the commands take: look-ups, those that ship, directories; trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from specmla.cli.drafts import drafter_from
from specmla.cli.lookup import LOOKUPS
from specmla.cli.run import MakeDrafter
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.proposal import Drafter
from specmla.verify.step import VerifyStep

ASSETS = Path(str(files("specmla"))) / "assets"
SHIPPED: Mapping[str, Path] = MappingProxyType(
    {
        "draft_model": ASSETS / "draft",
        "mtp": ASSETS / "mtp",
        "dflash": ASSETS / "dflash",
        "dspark": ASSETS / "dspark",
    }
)
"""Where the drafters for the shipped target lie."""
TREE = "-tree"
"""Stands behind a directory or a name of `SHIPPED` for trees of it."""


def is_known(name: str) -> bool:
    """Tell whether a drafter goes by this name; what its directory holds is not looked at."""
    return name in LOOKUPS or bool(_bare(name) and folder_of(name).is_dir())


def is_tree(name: str) -> bool:
    """Tell whether trees are meant; of a directory that ends so itself they are not."""
    return name.endswith(TREE) and (name in LOOKUPS or not Path(name).is_dir())


def folder_of(name: str) -> Path:
    """Give the directory that a name stands for, which is none of `LOOKUPS`."""
    bare = _bare(name)
    return SHIPPED.get(bare, Path(bare))


def make_named(
    name: str,
    target: DeepseekForCausalLM,
    *,
    num_requests: int,
    longest: int,
    backend: str | None = None,
    tree: bool = False,
) -> MakeDrafter:
    """Load the drafter of a name, as `drafter_from` does a directory's.

    Args:
        name: one that `is_known`.
        target: that it drafts for.
        num_requests: at once.
        longest: tokens of a request, drafts included.
        backend: attention backend of the drafter's own cache, by name.
        tree: draft trees, as `TREE` behind the name says too.

    Raises:
        ArgumentError, CheckpointError: as `drafter_from`.
    """
    if name in LOOKUPS:
        return _lookup(LOOKUPS[name], target.config.vocab_size)
    return drafter_from(
        folder_of(name),
        target,
        num_requests=num_requests,
        longest=longest,
        backend=backend,
        tree=tree or is_tree(name),
    )


def _bare(name: str) -> str:
    return name.removesuffix(TREE) if is_tree(name) else name


def _lookup(make: Callable[[int], Drafter], vocab_size: int) -> MakeDrafter:
    def made(step: VerifyStep) -> Drafter:
        return make(vocab_size)

    return made
