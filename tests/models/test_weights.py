"""Checkpoints: round trips, transformers reading ours, and every way a directory can be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specmla.config import MLAConfig
from specmla.errors import ArgumentError, CheckpointError
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.moe import MoEConfig
from specmla.models.weights import load_checkpoint, read_config, save_checkpoint

ATTENTION = MLAConfig(16, 3, 32, 8, 4, 12, q_lora_rank=8)
MOE = MoEConfig(
    4,
    2,
    5,
    n_shared_experts=1,
    first_k_dense_replace=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
)
EMBED, BIAS = "model.embed_tokens.weight", "model.layers.1.mlp.gate.e_score_correction_bias"


def make_model(**changed: Any) -> DeepseekForCausalLM:
    config = DeepseekConfig(
        **{
            "attention": ATTENTION,
            "num_layers": 2,
            "vocab_size": 19,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
            "moe": MOE,
            "eos_token_ids": (3,),
            **changed,
        }
    )
    torch.manual_seed(0)
    model = DeepseekForCausalLM(config)
    model.reset_parameters(std=0.3)
    for name, value in model.named_buffers():
        assert name == BIAS
        value.normal_()
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(make_model(), tmp_path / "model")
    return tmp_path / "model"


def shard(directory: Path) -> list[str]:
    """Split the single file into two shards with an index; gives their names."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    halves = [{}, {}]
    for i, name in enumerate(sorted(state)):
        halves[i % 2][name] = state[name]
    for name, half in zip(names, halves, strict=True):
        save_file(half, directory / name, metadata={"format": "pt"})
    index = {name: names[i] for i, half in enumerate(halves) for name in half}
    write_json(directory / "model.safetensors.index.json", {"weight_map": index})
    return names


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(directory / "model.safetensors")
    edit(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path, **changed: Any) -> None:
    path = directory / "config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changed)


def assert_equal(got: DeepseekForCausalLM, want: DeepseekForCausalLM) -> None:
    assert got.config == want.config
    theirs = want.state_dict()
    assert got.state_dict().keys() == theirs.keys()
    for name, value in got.state_dict().items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moe", [None, MOE])
def test_round_trip(tmp_path: Path, tied: bool, moe: MoEConfig | None) -> None:
    model = make_model(tie_word_embeddings=tied, moe=moe)
    save_checkpoint(model, tmp_path / "a" / "b")
    loaded, config = load_checkpoint(tmp_path / "a" / "b")
    assert_equal(loaded, model)
    assert config == loaded.config
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    with safe_open(tmp_path / "a" / "b" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    ids = torch.arange(7)[None]
    assert torch.equal(loaded.forward_full(ids), model.forward_full(ids))


def test_shards(saved: Path) -> None:
    shard(saved)
    assert_equal(load_checkpoint(saved)[0], make_model())


def test_dtype_is_the_stored_one_unless_asked(saved: Path) -> None:
    half, _ = load_checkpoint(saved, dtype=torch.bfloat16)
    for name, value in half.state_dict().items():
        router = ".mlp.gate." in name
        assert value.dtype == (torch.float32 if router else torch.bfloat16), name
    save_checkpoint(half, saved)
    again, _ = load_checkpoint(saved)
    assert_equal(again, half)
    assert again.model.embed_tokens.weight.dtype == torch.bfloat16
    assert load_checkpoint(saved, dtype=torch.float64)[0].state_dict()[BIAS].dtype == torch.float64
    with pytest.raises(ArgumentError, match=r"dtype is torch.int8, accepted are floating"):
        load_checkpoint(saved, dtype=torch.int8)


def test_weights_do_not_stay_mapped_to_the_file(saved: Path) -> None:
    model, _ = load_checkpoint(saved)
    path = saved / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert_equal(model, make_model())


def test_left_out_tensors(saved: Path) -> None:
    """MTP layers, rotary buffers, a second copy of a tied head."""
    edit_config(saved, num_nextn_predict_layers=1)
    extra = {
        "model.layers.2.eh_proj.weight": torch.zeros(2),
        "model.layers.2.self_attn.q_a_proj.weight": torch.zeros(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    edit_weights(saved, lambda state: state.update(extra))
    assert_equal(load_checkpoint(saved)[0], make_model(num_mtp_layers=1))
    edit_config(saved, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.2.eh_proj.weight"):
        load_checkpoint(saved)


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    save_checkpoint(model, tmp_path)
    edit_weights(tmp_path, lambda state: state.update({"lm_head.weight": state[EMBED].clone()}))
    assert_equal(load_checkpoint(tmp_path)[0], model)


def test_all_tensors_that_do_not_fit_are_named(saved: Path) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        del state["model.norm.weight"], state["lm_head.weight"]
        state["model.layers.0.self_attn.kv_b_proj.weight"] = torch.zeros(60, 31)
        state["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(1)

    edit_weights(saved, edit)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(saved)
    message = str(raised.value)
    assert "missing: model.norm.weight, lm_head.weight;" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.weight (model.safetensors);" in message
    shape = "kv_b_proj.weight (model.safetensors) [60, 31] for [60, 32]"
    assert message.endswith(f"of another shape: model.layers.0.self_attn.{shape}")


def test_many_names_are_cut_short(saved: Path) -> None:
    edit_weights(saved, lambda state: [state.pop(name) for name in list(state)[:20]])
    with pytest.raises(CheckpointError, match=r"and 12 more$"):
        load_checkpoint(saved)


Breaker = Callable[[Path], object]


def _truncate(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def _drop_shard(directory: Path) -> None:
    (directory / shard(directory)[1]).unlink()


def _cut_shard(directory: Path) -> None:
    _truncate(directory / shard(directory)[1], 0.9)


def _index(content: Any) -> Breaker:
    return lambda d: write_json(d / "model.safetensors.index.json", content)


BROKEN: dict[str, tuple[Breaker, str]] = {
    "no-directory": (lambda d: d.rename(d.parent / "gone"), r"config.json is missing"),
    "no-config": (lambda d: (d / "config.json").unlink(), r"config.json is missing"),
    "bad-json": (lambda d: _truncate(d / "config.json", 0.5), r"config.json is not readable JSON"),
    "not-text": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), r"not readable JSON"),
    "not-an-object": (lambda d: write_json(d / "config.json", []), r"holds a list"),
    "other": (
        lambda d: edit_config(d, architectures=["Qwen3ForCausalLM"]),
        r"config.json: .*\['Qwen3ForCausalLM'\], accepted are",
    ),
    "dims": (lambda d: edit_config(d, kv_lora_rank=-1), r"config.json: .*kv_lora_rank is -1"),
    "quantised": (
        lambda d: edit_config(d, quantization_config={"quant_method": "gptq"}),
        r"quant_method is 'gptq', accepted are 'fp8' and 'compressed-tensors'",
    ),
    "no-weights": (lambda d: (d / "model.safetensors").unlink(), r"holds neither model.safe"),
    "cut-data": (lambda d: _truncate(d / "model.safetensors", 0.9), r"model.safetensors is trunc"),
    "cut-header": (lambda d: _truncate(d / "model.safetensors", 0.01), r"truncated or corrupt"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), r"truncated or corrupt"),
    "noise": (lambda d: (d / "model.safetensors").write_bytes(b"\xa5" * 999), r"corrupt"),
    "dtype": (
        lambda d: edit_weights(d, lambda s: s.update({EMBED: s[EMBED].to(torch.int8)})),
        r"a tensor has dtype 'I8', accepted are",
    ),
    "integers": (
        lambda d: edit_weights(d, lambda s: s.update({EMBED: s[EMBED].to(torch.int64)})),
        r"of no floating dtype: model.embed_tokens.weight \(model.safetensors\) torch.int64",
    ),
    "no-shard": (_drop_shard, r"model-00002-of-00002.safetensors named in .* and missing"),
    "cut-shard": (_cut_shard, r"model-00002-of-00002.safetensors is truncated or corrupt"),
    "empty-index": (_index({}), r"has no weight_map"),
    "odd-index": (_index({"weight_map": ["a"]}), r"has no weight_map"),
    "index-outside": (_index({"weight_map": {EMBED: "../x"}}), r"outside its directory"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_directories(saved: Path, name: str) -> None:
    breaker, message = BROKEN[name]
    breaker(saved)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


def test_read_config_needs_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert read_config(saved) == make_model().config


def test_transformers_reads_what_we_save(pair: Any, tmp_path: Path) -> None:
    """A real round trip: its weights, through our model and our files, give its logits."""
    transformers = pytest.importorskip("transformers")
    save_checkpoint(pair.ours, tmp_path)
    ids = torch.arange(17)[None] * 5 % 97
    with pair.widened():
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", experts_implementation="eager"
        )
    assert type(back) is type(pair.theirs)
    assert back.dtype == torch.float64
    with torch.no_grad(), pair.widened():
        torch.testing.assert_close(back(ids).logits, pair.oracle(ids), rtol=0, atol=1e-10)


def test_reset_parameters() -> None:
    model = make_model()
    model.reset_parameters(std=0.1, generator=torch.Generator().manual_seed(1))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    model.reset_parameters(std=0.1, generator=torch.Generator().manual_seed(1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name])
        if name == BIAS:
            assert not value.any()
        elif value.dim() == 1:
            assert (value == 1).all()
        elif value.numel() > 200:
            assert value.std() == pytest.approx(0.1, rel=0.25), name
