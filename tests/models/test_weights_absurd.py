"""Absurd sizes in config.json are refused at once: no hang, no memory, no traceback of torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specmla import CheckpointError, load_checkpoint, save_checkpoint
from tests.models.test_weights import make_model


@pytest.mark.parametrize("value", [10**7, 2**31 - 2, 10**30])
@pytest.mark.parametrize(
    "name",
    [
        *("num_hidden_layers", "n_routed_experts", "moe_intermediate_size", "hidden_size"),
        *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "num_attention_heads"),
    ],
)
def test_absurd_sizes(tmp_path: Path, name: str, value: int) -> None:
    save_checkpoint(make_model(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(tmp_path)


def test_deep_json(tmp_path: Path) -> None:
    save_checkpoint(make_model(), tmp_path)
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="not readable JSON"):
        load_checkpoint(tmp_path)


def test_sizes_that_no_tensor_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: object, **__: object) -> None:
        raise RuntimeError("numel overflowed\nlong story")

    save_checkpoint(make_model(), tmp_path)
    monkeypatch.setattr(torch.nn.Linear, "__init__", overflow)
    with pytest.raises(CheckpointError, match=r"no tensor can have: numel overflowed$"):
        load_checkpoint(tmp_path)
