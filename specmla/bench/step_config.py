"""The model that `bench step --config` runs: some layers of a config, one rank's share of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specmla.errors import ArgumentError, require
from specmla.models.config import DeepseekConfig

MLP = {
    "dense": "one MLP as wide as the experts that a token takes",
    "routed": "all experts, each rank a share of their width",
}


def read_config(
    path: Path, num_layers: int, num_ranks: int, experts: str = "dense"
) -> DeepseekConfig:
    """Read a Hugging Face `config.json` and cut it down to what one rank of a few layers computes.

    Heads and MLP widths are divided by `num_ranks`; embedding and head stay whole. With experts
    "routed" every layer has them. With "dense" they are one MLP of the width that a token
    activates: the operations of a token are right, but a large batch of a real model reads more
    weights, those of all experts that it hits.

    Args:
        path: the file, or the directory that holds it.
        num_layers: layers to run.
        num_ranks: of tensor parallelism.
        experts: "dense" or "routed", of a config that has experts.

    Raises:
        ArgumentError: no such file, no such config, or widths that the ranks don't divide.
    """
    whole = DeepseekConfig.from_hf(_read_object(path))
    moe, width = whole.moe, whole.intermediate_size
    widths = {"num_attention_heads": whole.attention.num_heads}
    if moe is not None and experts == "dense":
        width = (moe.num_experts_per_tok + moe.n_shared_experts) * moe.moe_intermediate_size
    widths["intermediate_size"] = width
    if moe is not None and experts == "routed":
        widths["moe_intermediate_size"] = moe.moe_intermediate_size
    require(
        [
            f"{name} is {size}, accepted are multiples of --tp ({num_ranks})"
            for name, size in widths.items()
            if size % num_ranks
        ],
        "--config",
    )
    share: dict[str, Any] = {name: size // num_ranks for name, size in widths.items()}
    # A config whose first layers are dense, all of them, has no experts.
    first = num_layers if experts == "dense" else 0
    cut = share | {"num_hidden_layers": num_layers, "first_k_dense_replace": first}
    return DeepseekConfig.from_hf(whole.to_hf() | cut)


def _read_object(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--config is {path}, accepted is a config.json: {error}") from error
    if not isinstance(source, dict):
        raise ArgumentError(f"--config is {path}, accepted is a config.json: it holds no object")
    return source
