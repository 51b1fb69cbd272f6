"""Block drafters' configs of wrong types, and networks in the wrong place: refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

from drafters import (
    DFlashDrafter,
    DSparkDrafter,
    GQADFlashDrafter,
    GQADSparkDrafter,
    load_block_model,
    save_block_model,
)
from drafters.block_config import BlockConfig
from drafters.gqa_config import GQAConfig
from specmla import ArgumentError, CheckpointError, SpecMLAError, load_mtp, save_part
from specmla.cli.drafts import drafter_from
from tests.drafters.networks import attention, tiny_block, tiny_mtp, tiny_target

HUGE = 10**30


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(params=["mla", "gqa"])
def config(request, target) -> dict:
    found = tiny_block(target, "dspark").config.to_hf()
    if request.param == "gqa":
        found = {k: v for k, v in found.items() if k != "kv_lora_rank"}
        del found["dflash_config"]["attention_mode"]
        found |= GQAConfig(32, 4, 2, 8).to_hf()
    BlockConfig.from_hf(found)
    return found


def with_value(config: dict, name: str, value: object) -> dict:
    changed = json.loads(json.dumps(config))
    place = changed["dflash_config"] if name in changed["dflash_config"] else changed
    place[name] = value
    return changed


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("architectures", 5, "DFlashDraftModel"),
        ("architectures", [["DFlashDraftModel"]], "DFlashDraftModel"),
        ("vocab_size", "61", "integers >= 1"),
        ("vocab_size", [61], "integers >= 1"),
        ("intermediate_size", 1.5, "integers >= 1"),
        ("num_hidden_layers", True, "integers >= 1"),
        ("dflash_config", [1], "an object"),
        ("dflash_config", "x", "an object"),
        ("target_layer_ids", 2, "list of integers"),
        ("target_layer_ids", [], "list of integers"),
        ("target_layer_ids", [0.5], "list of integers"),
        ("sample_from_anchor", "false", "true, false"),
        ("sample_from_anchor", math.nan, "true, false"),
        ("sample_from_anchor", 1, "true, false"),
        ("enable_confidence_head", "false", "true, false"),
        ("block_size", HUGE, "below 2**31"),
        ("markov_rank", HUGE, "below 2**31"),
        ("mask_token_id", "0", "0 .. 60"),
        ("mask_token_id", 61, "0 .. 60"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(config, name, value, accepted):
    with pytest.raises(ArgumentError) as caught:
        BlockConfig.from_hf(with_value(config, name, value))
    assert f"{name} is {value!r}, accepted" in str(caught.value)
    assert accepted in str(caught.value)


def test_all_reasons_are_listed_at_once(config):
    wrong = {"architectures": 5, "vocab_size": "61", "sample_from_anchor": "x", "hidden_act": 1}
    wrong["hidden_size"] = []
    for name, value in wrong.items():
        config = with_value(config, name, value)
    with pytest.raises(ArgumentError) as caught:
        BlockConfig.from_hf(config)
    assert all(f"{name} is {value!r}" in str(caught.value) for name, value in wrong.items())


def test_a_silent_config_samples_as_its_architecture_does(config):
    assert BlockConfig.from_hf(with_value(config, "sample_from_anchor", None)).sample_from_anchor


BAD = [None, -1, 0, 1.5, "x", [], {}, True, [1], ["a"], math.nan, math.inf, HUGE, [[]], {"a": 1}]


def test_whatever_a_field_holds_is_read_or_refused(config):
    names = [*config, *config["dflash_config"], "head_dim", "layer_types", "rope_parameters"]
    for name in names:
        for value in BAD:
            try:
                found = BlockConfig.from_hf(with_value(config, name, value))
            except ArgumentError:
                continue
            assert isinstance(found.sample_from_anchor, bool)
            assert 0 < found.num_drafts < 2**31


def test_whatever_speculators_write_is_read_or_refused():
    layers = GQAConfig(32, 4, 2, 8).to_hf() | {"vocab_size": 61, "num_hidden_layers": 1}
    source = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers | {"intermediate_size": 48},
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": 4,
        "mask_token_id": 60,
    }
    assert BlockConfig.from_hf(source).target_layer_ids == (0, 1)
    for name in source:
        for value in BAD:
            try:
                BlockConfig.from_hf(source | {name: value})
            except ArgumentError:
                continue
            assert (name, value) in [("aux_hidden_state_layer_ids", [1]), ("mask_token_id", 0)]


def test_built_configs_are_checked_as_read_ones_are():
    with pytest.raises(ArgumentError) as caught:
        BlockConfig(attention(32), 1, 48, "61", HUGE, 60, 2, "false")
    wanted = ("vocab_size is '61'", "block_size is 1000", "target_layer_ids is 2")
    assert all(part in str(caught.value) for part in (*wanted, "sample_from_anchor is 'false'"))


def test_a_block_is_no_longer_than_the_context(target, tmp_path):
    save_block_model(tiny_block(target, "dflash", block_size=161), tmp_path)
    with pytest.raises(CheckpointError, match=r"block_size is 161, .*, 160"):
        load_block_model(tmp_path, target)


@pytest.mark.parametrize("dtype", [torch.int8, "float32"])
def test_weights_are_of_floating_types(target, tmp_path, dtype):
    save_block_model(tiny_block(target, "dflash"), tmp_path / "block")
    prefix = f"model.layers.{target.config.num_layers}."
    save_part(tiny_mtp(target), tmp_path / "mtp", target.config.to_hf(), prefix)
    for load, folder in ((load_block_model, "block"), (load_mtp, "mtp")):
        with pytest.raises(ArgumentError, match=r"dtype is .*, accepted are floating types"):
            load(tmp_path / folder, target, dtype=dtype)


@pytest.mark.parametrize("kind", [DFlashDrafter, DSparkDrafter, GQADFlashDrafter, GQADSparkDrafter])
def test_target_and_draft_swapped(target, kind):
    with pytest.raises(ArgumentError) as caught:
        kind(tiny_block(target, "dspark"), target, num_pages=9)
    for part in ("model is a BlockDraftModel", "draft is a DeepseekForCausalLM"):
        assert f"{part}, accepted is a" in str(caught.value)


@pytest.mark.parametrize("value", [5, [["x"]], {"a": 1}])
def test_a_directory_of_no_architecture_is_refused(target, tmp_path, value):
    save_block_model(tiny_block(target, "dflash"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": value}))
    with pytest.raises(SpecMLAError, match="architectures is"):
        drafter_from(tmp_path, target, num_requests=1, longest=40)
