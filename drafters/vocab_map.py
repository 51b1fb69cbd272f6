"""Which of the target's ids a drafter of a reduced vocabulary can draft.

Files hold `d2t` [draft_vocab_size], what is added to a draft id to give the target's, and `t2d`
[vocab_size] bool, which ids these are; one of them is enough, as draft ids rise with the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specmla import CheckpointError

NAMES = ("d2t", "t2d")


def read_offsets(folder: Path, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Read what is added to each draft id, [draft_vocab_size] int64; zeros for equal vocabularies.

    Raises:
        CheckpointError: no map of a reduced vocabulary, one that gives an id twice or none of the
            target's, or two maps that differ; every reason is named.
    """
    maps = _read_maps(folder)
    found = _problems(maps, draft_vocab_size, vocab_size)
    if found:
        raise CheckpointError(f"{folder}: " + "; ".join(found))
    place = torch.arange(draft_vocab_size)
    if "d2t" in maps:
        return maps["d2t"].long()
    return maps["t2d"].nonzero()[:, 0] - place if "t2d" in maps else torch.zeros_like(place)


def save_mapped(
    module: nn.Module, offsets: Tensor, vocab_size: int, directory: str | Path, config: Any
) -> None:
    """Write config.json and model.safetensors, d2t and t2d included."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
    known, d2t = torch.zeros(vocab_size, dtype=torch.bool), offsets.cpu()
    known[torch.arange(len(d2t)) + d2t] = True
    maps = {"d2t": d2t, "t2d": known}
    save_file(state | maps, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**config, "dtype": dtypes[0]}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _read_maps(folder: Path) -> dict[str, Tensor]:
    """Read both maps, as far as they are there; from a file of their own, too.

    Raises:
        CheckpointError: a file that can't be read.
    """
    maps: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in set(NAMES) & set(file.keys()):
                    maps[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error
    if "t2d" in maps:
        maps["t2d"] = maps["t2d"].to(torch.float32) != 0  # whatever 0 and 1 are written in
    return maps


def _problems(maps: dict[str, Tensor], count: int, size: int) -> list[str]:
    if not maps and count != size:
        return [
            f"d2t and t2d are missing, accepted without them is draft_vocab_size {size}, "
            f"not {count}"
        ]
    found, ids = [], None
    if (offsets := maps.get("d2t")) is not None:
        whole = not offsets.is_floating_point() and offsets.dtype is not torch.bool
        if whole and offsets.shape == (count,):
            given = torch.arange(count) + offsets.long()
            if len(given.unique()) == count and int(given.min()) >= 0 and int(given.max()) < size:
                ids = given
        if ids is None:
            found.append(
                f"d2t has {offsets.numel()} entries of {offsets.dtype}, accepted are {count} "
                f"integers that give different ids below {size}"
            )
    if (known := maps.get("t2d")) is not None:
        named = int(known.sum())
        if known.shape != (size,) or named != count:
            found.append(
                f"t2d names {named} of {known.numel()} ids, accepted are {count} of {size}"
            )
        elif ids is not None and not bool(known[ids].all()):
            found.append("t2d names other ids than d2t gives")
    return found
