"""`kv_b_proj` as e4m3 codes: what the widened weights give, in half of the memory."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.config import MLAConfig
from specmla.e4m3_up_projection import E4M3UpProjection
from specmla.errors import ArgumentError, CheckpointError, UnsupportedError
from specmla.kernels.matmul import matmul_rows
from specmla.layer import MLAAttention
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.scales import dequantise_into
from specmla.models.weights import load_checkpoint, reload_checkpoint, save_checkpoint
from specmla.quant_output import QuantOutput
from specmla.testing import assert_within_budget
from specmla.up_projection import UpProjection
from tests.models.test_scales import SHAPES, make_codes, make_scale, quantise_file
from tests.models.test_weights import make_model
from tests.test_invariance import ALONE, PROMPT, VERIFY, Served, assert_same, make_layer
from tests.test_prefill_memory import LiveBytes

pytestmark = pytest.mark.usefixtures("dots_by_row")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16]
if DEVICE.type == "cuda":
    DTYPES.append(torch.bfloat16)
# Heads of 104 rows, across the borders of the blocks; a last block of columns that is not whole.
STRADDLING = MLAConfig(144, 3, 160, 44, 4, 60)
# DeepSeek's: each head has a block for its keys and one for its values.
WHOLE = MLAConfig(144, 2, 256, 128, 16, 128)


def draw(*shape: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_pair(
    dims: MLAConfig, kind: str, dtype: torch.dtype
) -> tuple[E4M3UpProjection, UpProjection, UpProjection]:
    """Give the codes, the widened weights in `dtype`, and those in float64."""
    shape = (dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
    codes, scale = make_codes(shape, 1).to(DEVICE), make_scale(SHAPES[kind](*shape), 2).to(DEVICE)
    plain = UpProjection(dims).requires_grad_(False).to(DEVICE, dtype)
    exact = copy.deepcopy(plain).double()
    dequantise_into(plain.weight, codes, scale)
    dequantise_into(exact.weight, codes, scale)
    return E4M3UpProjection.from_codes(dims, codes, scale, dtype), plain, exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [STRADDLING, WHOLE], ids=["straddling", "whole"])
@pytest.mark.parametrize("kind", SHAPES)
def test_all_products_err_like_those_of_widened_weights(
    kind: str, dims: MLAConfig, dtype: torch.dtype
) -> None:
    made, plain, exact = make_pair(dims, kind, dtype)
    rows = 70
    q_nope = draw(rows, dims.num_heads, dims.qk_head_dim, dtype=dtype)[..., : dims.qk_nope_head_dim]
    latent = draw(dims.num_heads, rows, dims.kv_lora_rank, dtype=dtype).transpose(0, 1)
    cached = draw(rows, dims.cache_width, dtype=dtype)
    for name, given in (("absorb", q_nope), ("lift", latent)):
        got, want, torchs = (getattr(m, name)(given.to(m.dtype)) for m in (made, exact, plain))
        assert_within_budget(got, want, torchs, label=name)
    for got, want, torchs in zip(
        *(m.expand_rows(cached.to(m.dtype)) for m in (made, exact, plain)), strict=True
    ):
        assert got.dtype is dtype
        assert_within_budget(got, want, torchs, label="expand")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="other warps there: sums may be laid out else")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_to_the_bit_what_the_same_kernel_gives_of_widened_weights(
    kind: str, dtype: torch.dtype
) -> None:
    made, plain, _ = make_pair(STRADDLING, kind, dtype)
    w_uk, w_uv = plain.absorbed_weights()
    q_nope, latent = draw(66, 3, 44, dtype=dtype), draw(66, 3, 160, dtype=dtype)
    assert torch.equal(made.absorb(q_nope), matmul_rows(q_nope, w_uk))
    assert torch.equal(made.lift(latent), matmul_rows(latent, w_uv).flatten(1))
    whole = matmul_rows(latent[:, :1], plain.weight.t().unsqueeze(0))
    assert torch.equal(made(latent[:, 0]), whole[:, 0])
    assert torch.equal(made.absorb(q_nope[9:10])[0], made.absorb(q_nope)[9])


def test_no_code_is_read_wrongly() -> None:
    """All 256 codes, NaN and negative zero among them, through absorption and the lift."""
    dims = MLAConfig(8, 1, 256, 16, 0, 16)
    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1).view(torch.float8_e4m3fn)
    made = E4M3UpProjection.from_codes(
        dims, codes.to(DEVICE), torch.tensor(0.25, device=DEVICE), torch.float32
    )
    q_nope = torch.zeros(1, 1, 16, device=DEVICE)
    q_nope[..., 3] = 2.0
    want = codes[3].float() * 0.5
    got = made.absorb(q_nope).flatten().cpu()
    assert torch.equal(got.nan_to_num(9999.0), want.nan_to_num(9999.0))
    one = torch.eye(256, device=DEVICE)[:, None] * 4
    lifted = made.lift(one).cpu()  # of every code in turn; NaN spoils its column of products
    assert lifted.isnan().all()
    with torch.no_grad():
        made.weight.masked_fill_((made.weight & 0x7F) == 0x7F, 0)
    assert torch.equal(made.lift(one)[:, 0].cpu(), want.nan_to_num(0.0) * 2)


def steps_of(layer: MLAAttention) -> dict[int, Tensor]:
    return Served.make(layer, workspace_rows=64).run(
        [[(0, PROMPT, 90), (1, PROMPT, 33)], [(1, VERIFY, 5), (0, VERIFY, 4)]]
    )


def test_a_layer_gives_the_bits_of_one_with_widened_weights() -> None:
    """By batch-invariant kernels both, prompts and verifies; on a GPU within the error's floor."""
    layer = copy.deepcopy(make_layer(torch.float32))
    shape = tuple(layer.kv_b_proj.weight.shape)
    codes, scale = make_codes(shape, 3).to(DEVICE), make_scale((shape[0],), 4).to(DEVICE)
    dequantise_into(layer.kv_b_proj.weight, codes, scale)
    want = steps_of(layer)
    layer.kv_b_proj = E4M3UpProjection.from_codes(layer.config, codes, scale, torch.float32)
    got = steps_of(layer)
    if DEVICE.type == "cpu":
        assert_same(got, want)
    for i, rows in want.items():
        torch.testing.assert_close(got[i], rows, rtol=1e-4, atol=1e-4)
    alone = Served.make(layer).run([*ALONE[1]])
    assert_same({1: alone[1]}, got)
    with pytest.raises(UnsupportedError, match="exist as e4m3 codes alone"):
        layer.absorbed_weights()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_fused_outputs_are_those_of_the_same_kernel_over_widened_weights(
    kind: str, dtype: torch.dtype
) -> None:
    """Groups of 128 lie within heads of 128; keys of 44 rows put them across blocks of scales."""
    dims = dataclasses.replace(STRADDLING, v_head_dim=128)
    made, plain, _ = make_pair(dims, kind, dtype)
    latent = draw(35, 3, 160, dtype=dtype)
    got = []
    for module in (made, plain):
        values = torch.zeros(35, 3 * 128, dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(35, 3, device=DEVICE)
        output = QuantOutput(values.view(torch.float8_e4m3fn), block_scale=scales, fused=True)
        module.lift_into(output, latent)
        got.append((values, scales))
    assert got[0][0].any()
    assert torch.equal(got[0][0], got[1][0])
    assert torch.equal(got[0][1], got[1][1])


def test_half_of_the_memory_and_nothing_beside_the_results() -> None:
    dims = MLAConfig(64, 4, 512, 128, 64, 128)
    made, plain, _ = make_pair(dims, "block", torch.float16)
    held = sum(t.nbytes for t in (*made.parameters(), *made.buffers()))
    assert held <= 0.52 * plain.weight.nbytes
    q_nope, latent = draw(3, 4, 128, dtype=torch.float16), draw(3, 4, 512, dtype=torch.float16)
    with LiveBytes() as counter:
        results = [
            made.absorb(q_nope),
            made.lift(latent),
            *made.expand(latent[:, 0], latent[:, 0, :64]),
        ]
    assert counter.peak <= 4 * sum(t.nbytes for t in results)
    assert counter.peak < 0.2 * plain.weight.nbytes


def test_casts_and_moves_leave_codes_and_scales() -> None:
    made, _, exact = make_pair(STRADDLING, "channel", torch.float32)
    scale = made.scale.clone()
    half = copy.deepcopy(made).half()
    assert half.dtype is torch.float16
    assert half.scale.dtype is torch.float32
    assert torch.equal(half.scale, scale)
    assert torch.equal(half.weight, made.weight)
    latent = draw(5, 160, dtype=torch.float16)
    assert torch.allclose(half(latent).double(), exact(latent.double()), rtol=1e-2, atol=1e-2)
    assert copy.deepcopy(made).to("meta").scale.is_meta


def test_bad_weights_are_refused_all_at_once_and_change_nothing() -> None:
    made, _, _ = make_pair(STRADDLING, "block", torch.float32)
    before = made.weight.clone(), made.scale.clone()
    with pytest.raises(ArgumentError) as caught:
        made.load(torch.zeros(312, 160, dtype=torch.float8_e5m2), torch.zeros(4, 4))
    assert "codes are torch.float8_e5m2 [312, 160], accepted are torch.float8_e4m3fn" in str(
        caught.value
    )
    assert "scale is torch.float32 [4, 4], accepted are floating ones of [3, 2], [312, 1]" in str(
        caught.value
    )
    scale = torch.ones(312)
    scale[5], scale[6] = -1.0, torch.nan
    with pytest.raises(ArgumentError, match="scale has 1 NaN and 1 negative of 312"):
        made.load(make_codes((312, 160), 0), scale)
    assert torch.equal(made.weight, before[0])
    assert torch.equal(made.scale, before[1])
    with pytest.raises(ArgumentError, match="gradients are asked for"):
        made(torch.zeros(1, 160, device=DEVICE, requires_grad=True))


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "model"
    save_checkpoint(make_model(attention=STRADDLING), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kv_b(model: DeepseekForCausalLM) -> list[E4M3UpProjection]:
    found = [m for m in model.modules() if isinstance(m, E4M3UpProjection)]
    assert len(found) == model.config.num_layers
    return found


def test_a_checkpoint_s_codes_are_kept_and_reloaded_in_place(saved: Path) -> None:
    plain = load_checkpoint(saved)[0]
    quantise_file(saved, "block", "_scale_inv")
    model, _ = load_checkpoint(saved, device=DEVICE, keep_codes=True)
    widened, _ = load_checkpoint(saved)
    at = [(m.weight.data_ptr(), m.scale.data_ptr()) for m in kv_b(model)]
    for seed, kind in ((0, "block"), (5, "channel"), (6, "tensor-one")):
        quantise_file(saved, kind, "_scale", seed)
        for loaded in (model, widened):
            reload_checkpoint(loaded, saved)
        assert at == [(m.weight.data_ptr(), m.scale.data_ptr()) for m in kv_b(model)]
        rows = draw(3, 160, dtype=torch.float32)
        for made, layer in zip(kv_b(model), widened.model.layers, strict=True):
            want = layer.self_attn.kv_b_proj(rows.cpu())
            torch.testing.assert_close(made(rows).cpu(), want, rtol=1e-5, atol=1e-4)
    with pytest.raises(ArgumentError, match=r"kv_b_proj.weight: e4m3 codes, accepted are widened"):
        save_checkpoint(model, saved.parent / "other")
    before = [m.weight.clone() for m in kv_b(model)]
    save_checkpoint(plain, saved)
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight: not e4m3 with a scale"):
        reload_checkpoint(model, saved)
    with pytest.raises(CheckpointError, match=r"kv_b_proj.weight: not e4m3 with a scale"):
        load_checkpoint(saved, keep_codes=True)
    assert all(map(torch.equal, before, (m.weight for m in kv_b(model))))
