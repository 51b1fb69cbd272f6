"""Drafters by their directories, as the commands take them."""

from __future__ import annotations

import json

import pytest

from drafters import (
    DDTreeDrafter,
    DFlashDrafter,
    DraftModelDrafter,
    DraftModelTreeDrafter,
    DSparkDrafter,
    MTPDrafter,
    save_block_model,
    save_eagle3,
)
from specmla import (
    ArgumentError,
    CheckpointError,
    SamplingParams,
    build_step,
    save_checkpoint,
    save_part,
)
from specmla.cli.drafts import drafter_from
from specmla.cli.run import run_loop
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.networks import tiny_block, tiny_mtp, tiny_target


def save(kind: str, target, tmp_path) -> None:
    if kind == "mtp":
        prefix = f"model.layers.{target.config.num_layers}."
        save_part(tiny_mtp(target), tmp_path, target.config.to_hf(), prefix)
    elif kind == "model":
        save_checkpoint(tiny_target(layers=2), tmp_path)
    elif kind == "eagle3":
        save_eagle3(tiny_eagle3(target), tmp_path)
    else:
        save_block_model(tiny_block(target, kind), tmp_path)


@pytest.mark.parametrize(
    ("kind", "tree", "expected"),
    [
        ("mtp", False, MTPDrafter),
        ("dflash", False, DFlashDrafter),
        ("dspark", False, DSparkDrafter),
        ("model", False, DraftModelDrafter),
        ("dflash", True, DDTreeDrafter),
        ("model", True, DraftModelTreeDrafter),
    ],
)
def test_a_directory_is_the_drafter_that_its_config_says(kind, tree, expected, tmp_path):
    target = tiny_target()
    save(kind, target, tmp_path)
    make = drafter_from(
        tmp_path, target, num_requests=2, longest=40, backend="reference", tree=tree
    )
    step = build_step(target, num_pages=4, num_draft_layers=1)
    assert type(make(step)) is expected
    prompts, sampling = [[3, 1, 4], [5, 9]], [SamplingParams(max_tokens=12)] * 2
    plain = run_loop(target, prompts, sampling)
    drafted = run_loop(target, prompts, sampling, make, num_speculative_tokens=5)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.num_draft_tokens > 10


@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle3", "model"])
def test_pages_are_bounded_by_the_context(kind, tmp_path):
    target = tiny_target()
    save(kind, target, tmp_path)
    make = drafter_from(tmp_path, target, num_requests=2, longest=10**12, backend="reference")
    made = make(build_step(target, num_pages=4, num_draft_layers=1))
    blocks = made.blocks if kind == "model" else made.cache.blocks
    assert blocks.num_pages == 2 * (-(-160 // 64) + 1)
    prompts, sampling = [[3, 1, 4], [5, 9]], [SamplingParams(max_tokens=10**12)] * 2
    plain = run_loop(target, prompts, sampling)
    drafted = run_loop(target, prompts, sampling, make, num_speculative_tokens=5)
    assert drafted.tokens == plain.tokens
    assert [len(p) + len(t) for p, t in zip(prompts, drafted.tokens, strict=True)] == [160] * 2


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_what_drafts_chains_gives_no_trees(kind, tmp_path):
    target = tiny_target()
    save(kind, target, tmp_path)
    with pytest.raises(ArgumentError, match="chains"):
        drafter_from(tmp_path, target, num_requests=2, longest=40, tree=True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
        ({"speculators_model_type": "eagle3"}, "draft_vocab_size is missing"),
        ({"speculators_model_type": "mtp"}, "accepted are .'dflash', 'dspark', 'eagle3'"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "is .'LlamaForCausalLMEagle'., accepted"),
        ({"architectures": ["K3DSparkModel"], "kv_lora_rank": 16}, "'DSparkDraftModel', 'Qwen3"),
    ],
)
def test_known_formats_that_are_not_served_are_named(config, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason):
        drafter_from(tmp_path, tiny_target(), num_requests=2, longest=40)


@pytest.mark.parametrize("kind", ["mtp", "model", "eagle3"])
def test_graphs_leave_the_tokens_as_they_are(kind, tmp_path):
    target = tiny_target()
    save(kind, target, tmp_path)
    make = drafter_from(tmp_path, target, num_requests=2, longest=60, backend="reference")
    sampling = [SamplingParams(temperature, seed=3, max_tokens=20) for temperature in (0.0, 0.9)]
    runs = [
        run_loop(target, [[3, 1, 4], [1, 5, 9, 2, 6]], sampling, make, backend="reference",
                 graphs=graphs)
        for graphs in (False, True)
    ]  # fmt: skip
    assert runs[0].tokens == runs[1].tokens


@pytest.mark.parametrize("tree", [False, True])
def test_an_mtp_module_of_another_target_is_named_as_one(tree, tmp_path):
    save("mtp", tiny_target(), tmp_path)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers 3, the target's are 2$"):
        drafter_from(tmp_path, tiny_target(layers=2), num_requests=1, longest=40, tree=tree)
    wider = tiny_target(hidden=48)
    with pytest.raises(CheckpointError) as caught:
        drafter_from(tmp_path, wider, num_requests=1, longest=40)
    assert "attention is MLAConfig(hidden_size=32" in str(caught.value)
    assert "vocab_size is" not in str(caught.value), "what agrees is not listed"
