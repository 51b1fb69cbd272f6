"""The model that `bench step --config` runs: some layers of a config, one rank's share of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specmla.errors import ArgumentError, require
from specmla.models.config import DeepseekConfig

MLP = "dense, as wide as the experts that a token takes"


def read_config(path: Path, num_layers: int, num_ranks: int) -> DeepseekConfig:
    """Read a Hugging Face `config.json` and cut it down to what one rank of a few layers computes.

    Heads and MLP widths are divided by `num_ranks`; embedding and head stay whole. Experts become
    one dense MLP of the width that a token activates: the operations of a token are right, but a
    large batch of a real model reads more weights, those of all experts that it hits.

    Args:
        path: the file, or the directory that holds it.
        num_layers: layers to run.
        num_ranks: of tensor parallelism.

    Raises:
        ArgumentError: no such file, no such config, or widths that the ranks don't divide.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--config is {path}, accepted is a config.json: {error}") from error
    if not isinstance(source, dict):
        raise ArgumentError(f"--config is {path}, accepted is a config.json: it holds no object")
    whole = DeepseekConfig.from_hf(source)
    width = whole.intermediate_size
    if whole.moe is not None:
        taken = whole.moe.num_experts_per_tok + whole.moe.n_shared_experts
        width = taken * whole.moe.moe_intermediate_size
    widths = {"num_attention_heads": whole.attention.num_heads, "intermediate_size": width}
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
    cut = share | {"num_hidden_layers": num_layers, "first_k_dense_replace": num_layers}
    return DeepseekConfig.from_hf(whole.to_hf() | cut)
