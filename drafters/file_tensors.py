"""Single tensors of a checkpoint's files, for what a drafter decides before its module is built.

Damaged files are passed over here: whoever reads all tensors names them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import safe_open

from specmla import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def tensor_names(folder: Path) -> set[str]:
    """List the names of all tensors."""
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found.update(file.keys())
        except Exception:
            continue
    return found


def is_copy(folder: Path, name: str, module: nn.Module) -> bool:
    """Tell whether the files leave a tensor out, or hold the same as a module's weight.

    Other shapes are no copies. Values are compared in the dtype of the module.
    """
    weight = module.get_parameter("weight")
    got = _find(folder, name)
    if got is None:
        return True
    same = got.shape == weight.shape and got.is_floating_point()
    return same and bool((got.to(weight) == weight).all())


def check_embedding(folder: Path, embedding: nn.Module) -> None:
    """Refuse files with an embedding that is not the target's, which is used.

    Raises:
        CheckpointError: see above.
    """
    if not is_copy(folder, "embed_tokens.weight", embedding):
        raise CheckpointError(
            f"{folder}: embed_tokens.weight is not the target's, accepted is a copy of it or none"
        )


def _find(folder: Path, name: str) -> Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118
                    return cast("Tensor", file.get_tensor(name))
        except Exception:
            continue
    return None
