"""Quantised checkpoints: every granularity against a float64 loop, reload, every bad scale."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmla.config import MLAConfig
from specmla.errors import CheckpointError
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.scales import dequantise_into
from specmla.models.weights import load_checkpoint, read_config, reload_checkpoint, save_checkpoint
from tests.models.test_weights import MOE, make_model

# kv_b_proj is [3 * (44 + 60), 160] = [312, 160]: partial last blocks both ways, heads of 104 rows
# across the borders of the blocks.
ATTENTION = MLAConfig(144, 3, 160, 44, 4, 60, q_lora_rank=8)
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
E4M3 = torch.float8_e4m3fn
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
DEEPSEEK |= {"weight_block_size": [128, 128]}
SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "block": lambda o, i: (-(-o // 128), -(-i // 128)),
    "channel": lambda o, i: (o, 1),
    "channel-flat": lambda o, i: (o,),
    "tensor": lambda o, i: (),
    "tensor-one": lambda o, i: (1,),
}


def loop(codes: Tensor, scale: Tensor) -> Tensor:
    """Widen value by value in Python's floats: the product of 4 and 24 bits is exact in 53."""
    outputs, inputs = codes.shape
    code, factor = codes.double().tolist(), scale.double().flatten().tolist()
    columns = -(-inputs // 128)
    by_block = tuple(scale.shape) == (-(-outputs // 128), columns)
    out = []
    for o in range(outputs):
        for i in range(inputs):
            at = o // 128 * columns + i // 128 if by_block else o % len(factor)
            out.append(code[o][i] * factor[at])
    return torch.tensor(out, dtype=torch.float64).view(outputs, inputs)


def make_scale(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * 0.01 + 0.0003


def make_codes(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 40).clamp(-448, 448).to(E4M3)


def quantise_file(folder: Path, kind: str, suffix: str, seed: int = 0) -> dict[str, Tensor]:
    """Replace every linear weight but the head's by codes and scales; gives the exact weights."""
    model = load_checkpoint(folder)[0]
    linear = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    state, exact = load_file(folder / "model.safetensors"), {}
    for name in sorted(set(linear) - {"lm_head.weight"}):
        shape = tuple(state[name].shape)
        state[name] = make_codes(shape, seed)
        state = {k: v for k, v in state.items() if not k.startswith(name + "_scale")}
        state[name + suffix] = make_scale(SHAPES[kind](*shape), seed + 1)
        exact[name] = loop(state[name], state[name + suffix])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return exact


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(make_model(attention=ATTENTION, moe=MOE), tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config=DEEPSEEK)
    return tmp_path / "model"


def edit_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("kind", SHAPES)
def test_quantised_checkpoint_is_what_the_loop_says(saved: Path, kind: str, suffix: str) -> None:
    exact = quantise_file(saved, kind, suffix)
    assert KV_B in exact
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        state = load_checkpoint(saved, dtype=dtype)[0].state_dict()
        assert not any("scale" in name for name in state)
        for name, want in exact.items():
            # One product, rounded to float32, then to the dtype.
            rounded = want if dtype == torch.float64 else want.float().to(dtype)
            assert torch.equal(state[name], rounded), name
    # Unquantised tensors of the same file are as they were.
    assert torch.equal(state["lm_head.weight"], load_file(saved / "model.safetensors")[
        "lm_head.weight"].bfloat16())  # fmt: skip


def test_absorbed_weights_are_those_of_the_loop(saved: Path) -> None:
    exact = quantise_file(saved, "block", "_scale_inv")[KV_B]
    model = load_checkpoint(saved, dtype=torch.float64)[0]
    w_uk, w_uv_t = model.model.layers[0].self_attn.absorbed_weights()
    for head in range(3):
        first = head * 104
        assert torch.equal(w_uk[head], exact[first : first + 44])
        assert torch.equal(w_uv_t[head].T, exact[first + 44 : first + 104])


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (128, 128), (129, 128), (257, 511), (127, 1)])
@pytest.mark.parametrize("kind", SHAPES)
def test_dequantise_at_block_edges(shape: tuple[int, int], kind: str) -> None:
    codes, scale = make_codes(shape, 3), make_scale(SHAPES[kind](*shape), 4)
    storage = torch.full((shape[0], shape[1] + 5), torch.nan, dtype=torch.float64)
    target = storage[:, : shape[1]]  # rows with gaps
    dequantise_into(target, codes, scale)
    assert torch.equal(target, loop(codes, scale))
    assert storage[:, shape[1] :].isnan().all()


def test_every_code_and_extreme_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).view(1, 256)
    for value in (2.0**-126, 3e38, 1.0):
        scale = torch.tensor([[1.0, value]])
        got = torch.empty(1, 256, dtype=torch.float64)
        dequantise_into(got, codes, scale)
        want = codes.double() * scale.double().repeat_interleave(128, dim=1)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def addresses(model: DeepseekForCausalLM) -> dict[str, int]:
    found = {name: value.data_ptr() for name, value in model.state_dict().items()}
    for i, layer in enumerate(model.model.layers):
        w_uk, w_uv_t = layer.self_attn.absorbed_weights()
        found |= {f"uk{i}": w_uk.data_ptr(), f"uv{i}": w_uv_t.data_ptr()}
    return found


def test_reload_keeps_addresses_and_changes_results(saved: Path, tmp_path: Path) -> None:
    quantise_file(saved, "block", "_scale_inv")
    model = load_checkpoint(saved, dtype=torch.float64)[0]
    before, ids = addresses(model), torch.arange(7)[None]
    views = model.model.layers[0].self_attn.absorbed_weights()  # what a captured graph holds
    first = model.forward_full(ids)
    quantise_file(saved, "channel", "_scale", seed=7)
    fresh = load_checkpoint(saved, dtype=torch.float64)[0]
    reload_checkpoint(model, saved)
    assert addresses(model) == before
    assert not torch.equal(model.forward_full(ids), first)
    assert torch.equal(model.forward_full(ids), fresh.forward_full(ids))
    for view, want in zip(views, fresh.model.layers[0].self_attn.absorbed_weights(), strict=True):
        assert torch.equal(view, want)
    # Not quantised any more, in another dtype.
    save_checkpoint(fresh.bfloat16(), tmp_path / "plain")
    reload_checkpoint(model, tmp_path / "plain")
    assert addresses(model) == before
    assert model.lm_head.weight.dtype == torch.float64
    assert torch.equal(model.state_dict()[KV_B], fresh.state_dict()[KV_B].double())


def test_refused_reload_writes_nothing(saved: Path, tmp_path: Path) -> None:
    model = load_checkpoint(saved)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quantise_file(saved, "block", "_scale_inv")
    edit(saved, lambda s: s[KV_B + "_scale_inv"].view(-1)[-1:].zero_())
    with pytest.raises(CheckpointError, match="1 zero of 6"):
        reload_checkpoint(model, saved)
    save_checkpoint(make_model(), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"config\.json is DeepseekConfig"):
        reload_checkpoint(model, tmp_path / "other")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_all_bad_scales_are_named_at_once(saved: Path) -> None:
    quantise_file(saved, "block", "_scale_inv")
    at = "model.layers.0.self_attn."
    names = [at + n for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")]
    missing, zero, negative, shape = (f"{name}.weight" for name in names)
    kind, plain = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.input_layernorm.weight"
    double = "model.layers.0.mlp.up_proj.weight"

    def change(state: dict[str, Tensor]) -> None:
        del state[missing + "_scale_inv"]
        state[zero + "_scale_inv"].view(-1)[0] = 0.0
        state[negative + "_scale_inv"].view(-1)[0] = -0.5
        state[KV_B + "_scale_inv"].view(-1)[:2] = torch.tensor([torch.nan, math.inf])
        state[shape + "_scale_inv"] = torch.ones(2, 7)
        state[kind + "_scale_inv"] = torch.ones(1, 2, dtype=torch.float64)
        state[double + "_scale"] = torch.ones(())
        state[plain + "_scale"] = torch.ones(())

    edit(saved, change)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(saved)
    message = str(raised.value)
    for part in (
        f"the scale of {missing} is none, accepted is {missing}_scale_inv or {missing}_scale",
        f"{zero}_scale_inv has 1 zero of",
        f"{negative}_scale_inv has 1 negative of",
        f"{KV_B}_scale_inv has 1 NaN and 1 infinite of 6, accepted are finite values > 0",
        f"{shape}_scale_inv has shape [2, 7], accepted are [2, 2], [144, 1], [144], [1], []",
        f"{kind}_scale_inv is torch.float64, accepted are",
        f"the scale of {double} is {double}_scale and {double}_scale_inv",
        f"{plain}_scale scales {plain}, which is torch.float32",
    ):
        assert part in message, part


def test_only_linear_layers_may_be_quantised(saved: Path) -> None:
    name = "model.embed_tokens.weight"

    def change(state: dict[str, Tensor]) -> None:
        state[name], state[name + "_scale"] = state[name].to(E4M3), torch.ones(())

    edit(saved, change)
    with pytest.raises(CheckpointError, match=rf"{name} is torch.float8_e4m3fn, accepted are lin"):
        load_checkpoint(saved)


def test_what_is_left_out(saved: Path) -> None:
    """Scales of activations and of MTP layers; an input scale of nothing is unexpected."""
    quantise_file(saved, "tensor", "_scale")
    edit_config(saved, num_nextn_predict_layers=1)
    kept = load_checkpoint(saved)[0].state_dict()
    extra = {
        KV_B.replace(".weight", ".input_scale"): torch.ones(()),
        "model.layers.2.self_attn.q_a_proj.weight": torch.zeros(2, 2, dtype=E4M3),
        "model.layers.2.self_attn.q_a_proj.weight_scale_inv": torch.zeros(1, 1),
    }
    edit(saved, lambda state: state.update(extra))
    for name, value in load_checkpoint(saved)[0].state_dict().items():
        assert torch.equal(value, kept[name])
    edit(saved, lambda state: state.update({"model.layers.0.mlp.input_scale": torch.ones(())}))
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.0.mlp.input_scale"):
        load_checkpoint(saved)


def test_scale_in_another_shard(saved: Path) -> None:
    exact = quantise_file(saved, "block", "_scale_inv")
    state = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name, value in state.items():
        parts["b.safetensors" if "scale" in name else "a.safetensors"][name] = value
    for file, part in parts.items():
        save_file(part, saved / file, metadata={"format": "pt"})
    index = {name: file for file, part in parts.items() for name in part}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    got = load_checkpoint(saved, dtype=torch.float64)[0].state_dict()[KV_B]
    assert torch.equal(got, exact[KV_B])


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        }
    },
}


def test_compressed_tensors_names(saved: Path) -> None:
    exact = quantise_file(saved, "channel", "_scale")
    edit_config(saved, quantization_config=COMPRESSED)
    edit(saved, lambda s: s.update({KV_B + "_scale": s[KV_B + "_scale"].bfloat16()}))
    state = load_file(saved / "model.safetensors")
    exact[KV_B] = loop(state[KV_B], state[KV_B + "_scale"])
    assert torch.equal(load_checkpoint(saved, dtype=torch.float64)[0].state_dict()[KV_B],
                       exact[KV_B])  # fmt: skip


REFUSED: dict[str, tuple[Any, str]] = {
    "text": ("fp8", r"quantization_config is 'fp8', accepted are null and an object"),
    "e5m2": (DEEPSEEK | {"fmt": "e5m2"}, r"fmt is 'e5m2', accepted is 'e4m3'"),
    "blocks": (
        DEEPSEEK | {"fmt": "e5m2", "weight_block_size": [64, 64]},
        r"fmt is 'e5m2', .*; .*weight_block_size is \[64, 64\], accepted are null and \[128, 128\]",
    ),
    "no-groups": ({"quant_method": "compressed-tensors"}, r"format is None.*config_groups is None"),
    "int8": (
        COMPRESSED | {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
        r"g.weights.num_bits is 4.*type is 'int'.*symmetric is None.*strategy is None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_quantisations_are_refused_by_the_config(saved: Path, name: str) -> None:
    found, message = REFUSED[name]
    edit_config(saved, quantization_config=found)
    with pytest.raises(CheckpointError, match=message):
        read_config(saved)


def test_e5m2_weights_are_refused_by_name(saved: Path) -> None:
    edit(saved, lambda s: s.update({KV_B: s[KV_B].to(torch.float8_e5m2)}))
    with pytest.raises(CheckpointError, match=r"dtype 'F8_E5M2', accepted are"):
        load_checkpoint(saved)
