"""Drafters' files with absurd sizes or damaged maps: refused by name, at once."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import load_block_model, load_eagle3, save_block_model, save_eagle3
from drafters.block_config import BlockConfig
from drafters.block_model import make_block_model
from drafters.gqa_config import GQAConfig
from specmla import CheckpointError
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.networks import VOCAB, tiny_block, tiny_target

ABSURD = [10**7, 2**31 - 1]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def changed(folder, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def save_gqa(folder) -> None:
    config = BlockConfig(
        attention=GQAConfig(32, 4, 2, 8),
        num_layers=1,
        intermediate_size=40,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=60,
        target_layer_ids=(0, 2),
        sample_from_anchor=False,
    )
    save_block_model(make_block_model(config), folder)


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("name", ["num_hidden_layers", "head_dim"])
def test_blocks(target, tmp_path, name, value):
    save_gqa(tmp_path)
    changed(tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=rf"config\.json asks for .*{value}"):
        load_block_model(tmp_path, target)


@pytest.mark.parametrize("value", ABSURD)
def test_layers_of_mla_blocks(target, tmp_path, value):
    save_block_model(tiny_block(target, "dspark"), tmp_path)
    changed(tmp_path, num_hidden_layers=value)
    with pytest.raises(CheckpointError, match=f"asks for {value} tensors or more"):
        load_block_model(tmp_path, target)


def test_heads_of_eagle3(target, tmp_path):
    save_eagle3(tiny_eagle3(target), tmp_path)
    changed(tmp_path, qk_rope_head_dim=2**31 - 2)
    with pytest.raises(CheckpointError, match=f"{2**31 - 2} rotated values"):
        load_eagle3(tmp_path, target)


def test_a_yarn_factor_past_int64_is_a_number_as_any(target, tmp_path):
    save_eagle3(tiny_eagle3(target), tmp_path)
    scaling = {"rope_type": "yarn", "factor": 10**30, "original_max_position_embeddings": 64}
    changed(tmp_path, rope_scaling=scaling)
    rotary = load_eagle3(tmp_path, target).rotary
    assert rotary.inv_freq.isfinite().all()


@pytest.mark.parametrize("make", ["junk", "folder"])
@pytest.mark.parametrize("kind", ["block", "eagle3"])
def test_another_file_that_is_no_safetensors(target, tmp_path, kind, make):
    if kind == "block":
        load = load_block_model
        save_block_model(tiny_block(target, "dflash", draft_vocab_size=40), tmp_path)
    else:
        load = load_eagle3
        save_eagle3(tiny_eagle3(target), tmp_path)
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"junk") if make == "junk" else other.mkdir()
    with pytest.raises(CheckpointError, match=r"other\.safetensors is truncated or corrupt"):
        load(tmp_path, target)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.float32])
def test_a_map_of_any_dtype_says_the_same(target, tmp_path, dtype):
    save_eagle3(tiny_eagle3(target), tmp_path)
    wanted, path = load_eagle3(tmp_path, target).d2t, tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["d2t"]
    tensors["t2d"] = tensors["t2d"].float().to(dtype)
    save_file(tensors, path)
    assert torch.equal(load_eagle3(tmp_path, target).d2t, wanted)
