"""Builds modules without memory, and refuses sizes that their files can't hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from specmla.errors import CheckpointError
from specmla.models.shards import CONFIG, Headers

M = TypeVar("M", bound=nn.Module)


def build_empty(
    folder: Path, headers: Headers, make: Callable[[], M], least: int = 0, rotated: int = 0
) -> M:
    """Build a module on the meta device, unless the files can't hold its layers and experts: a
    count of 10**9 would be built one by one, as many rotary frequencies would take memory.

    Args:
        folder: of the files.
        headers: theirs.
        make: builds the module.
        least: tensors that it has at least.
        rotated: values of a head that are rotated; some tensor is as wide.

    Raises:
        CheckpointError: sizes that the files, or tensors, don't have.
    """
    shapes = [shape for header in headers.values() for shape, _ in header.values()]
    widest = max(map(max, filter(None, shapes)), default=0)
    if least > len(shapes) or rotated > widest:
        raise CheckpointError(
            f"{folder}: {CONFIG} asks for {least} tensors or more and {rotated} rotated values, "
            f"the files hold {len(shapes)}, none wider than {widest}"
        )
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder}: {CONFIG} has sizes no tensor can have: {reason}"
        ) from error
