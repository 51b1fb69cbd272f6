"""What the account says is what gets allocated: pool, workspace, plans and weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla import (
    DeepseekConfig,
    DeepseekForCausalLM,
    LatentCache,
    MLAConfig,
    UnsupportedError,
)
from specmla.accounting import Account, Load, ModelSize, account, scratch_buffers
from specmla.backends.base import AttentionBackend
from specmla.backends.hopper import HopperBackend
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import BACKENDS, get_backend
from specmla.backends.step_size import StepSize
from specmla.buffers import total_bytes
from specmla.cache.formats import cache_format
from specmla.cache.formats.names import QUANTISED_NAMES
from specmla.cache.layout import CacheLayout
from specmla.errors import ArgumentError
from specmla.kernels.launch import Device
from specmla.models.moe import MoEConfig
from specmla.models.sizes import stored_weight_bytes
from specmla.testing import make_case
from specmla.workspace import PrefillWorkspace, workspace_rows

H200 = Device("sm_90", 132)
SMALL = MLAConfig(
    hidden_size=48,
    num_heads=3,
    kv_lora_rank=32,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=12,
    q_lora_rank=20,
)
EXPERTS = MoEConfig(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_shared_experts=1,
    first_k_dense_replace=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
)
V3 = MLAConfig(
    hidden_size=7168,
    num_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=1536,
)


def of_v3(**changes: Any) -> Account:
    load = Load(**({"context": 2**17, "batch": 32, "query_len": 5, "device": H200} | changes))
    return account(ModelSize(V3, 61), CacheLayout(576, torch.bfloat16, 64), load)


def tensors(plan: object) -> list[Tensor]:
    assert dataclasses.is_dataclass(plan)
    values = [getattr(plan, field.name) for field in dataclasses.fields(plan)]
    return [value for value in values if isinstance(value, Tensor)]


def held_bytes(plan: object) -> int:
    """Bytes of the storages that the tensors of a plan lie in, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors(plan)}
    return sum(storage.nbytes() for storage in storages.values())


def test_deepseek_v3() -> None:
    found = of_v3()
    assert found.layout.bytes_per_row == 1152
    assert found.bytes_per_token == 70_272
    assert found.pages_per_request == 2048
    assert found.mha_bytes_per_row == 81_920
    assert found.gqa_bytes_per_row == 4096
    assert found.cache_bytes(32) == 32 * 2**17 * 70_272
    assert found.preferred == "hopper"
    assert list(found.scratch)[:3] == ["hopper", "triton", "rows"]
    two_slots_an_sm = 2 * 132 * (2 * 64 * 256 + 2 * 64) * 4
    assert two_slots_an_sm < found.scratch["hopper"] < two_slots_an_sm + 2**17


def test_the_pool_is_what_was_counted() -> None:
    for dtype, page_size in ((torch.bfloat16, 64), (torch.float32, 3)):
        layout = CacheLayout(48, dtype, page_size)
        load = Load(context=100, batch=2, query_len=1, device=H200)
        found = account(ModelSize(SMALL, 3), layout, load)
        cache = LatentCache(3, 2 * found.pages_per_request, page_size, 48, dtype, "cpu")
        assert cache.layer(0).untyped_storage().nbytes() == found.cache_bytes(2)


@pytest.mark.parametrize("name", QUANTISED_NAMES)
def test_the_pool_of_a_quantised_format_is_what_was_counted(name: str) -> None:
    fmt = cache_format(name, 512, 64)
    layout = CacheLayout(576, torch.bfloat16, 64, fmt)
    found = account(ModelSize(V3, 3), layout, Load(100, 2, 1, H200))
    cache = LatentCache(3, 4, 64, 576, torch.bfloat16, "cpu", format=fmt)
    assert cache.layer(0).untyped_storage().nbytes() == found.cache_bytes(2)
    assert found.bytes_per_token == 3 * fmt.bytes_per_row < 3 * 1152
    assert "reference" in found.scratch
    for other in BACKENDS:
        served = name in get_backend(other).capabilities.formats
        assert (other in found.scratch) == served, other
        assert served or any(name in reason for reason in found.refused[other])
    assert found.mha_bytes_per_row == 81_920


def test_the_workspace_is_what_was_counted() -> None:
    for context, batch in ((100, 1), (3, 40), (2**20, 2)):
        load = Load(context=context, batch=batch, query_len=1, device=H200)
        found = account(ModelSize(SMALL, 1), CacheLayout(48, torch.float32, 16), load)
        workspace = PrefillWorkspace(48, 16, torch.float32, "cpu")
        workspace.claim(workspace_rows(context, batch, 16))
        assert workspace.rows(1).untyped_storage().nbytes() == found.workspace_bytes(batch)


def triton_backends() -> list[AttentionBackend]:
    pytest.importorskip("triton")
    from specmla.backends.rows import RowsBackend
    from specmla.backends.triton import TritonBackend

    return [
        made
        for kind in (TritonBackend, RowsBackend)
        for made in (kind(), kind(num_splits=3), kind(batch_invariant=True, piece_keys=64))
    ]


@pytest.mark.parametrize("batch", ["1q1s70", "5q4s300", "3q1-7s200", "40q2s64"])
@pytest.mark.parametrize("heads", [1, 12, 20])
def test_plans_of_triton_hold_what_was_counted(batch: str, heads: int) -> None:
    case = make_case(batch, num_heads=heads, kv_lora_rank=32, rope_dim=16, page_size=16)
    for backend in triton_backends():
        part = case.planned(backend)
        size = StepSize.of(part, heads, 32, torch.float32)
        assert held_bytes(part.plan) == total_bytes(backend.scratch(size))


@pytest.mark.parametrize("batch", ["5q4s300", "3q1s200", "3q1-7s200"])
def test_plans_of_the_reference_hold_at_most_what_was_counted(batch: str) -> None:
    backend = ReferenceBackend()
    case = make_case(batch, num_heads=3, kv_lora_rank=32, rope_dim=16, page_size=16)
    part = case.planned(backend)
    counted = total_bytes(backend.scratch(StepSize.of(part, 3, 32, torch.float32)))
    held = sum(t.numel() * t.element_size() for t in tensors(part.plan))
    assert 0.8 * counted <= held <= counted


@pytest.mark.parametrize("invariant", [False, True])
def test_the_hopper_plan_reserves_what_was_counted(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pytest.importorskip("specmla.kernels.hopper.plan")
    from specmla.kernels.hopper.bounds import plan_shape

    monkeypatch.setattr(plan, "describe_device", lambda device: H200)
    backend = HopperBackend(batch_invariant=invariant, piece_keys=128)
    load = Load(context=1000, batch=7, query_len=3, device=H200)
    model = ModelSize(dataclasses.replace(V3, num_heads=20), 1)
    counted = scratch_buffers(backend, model, CacheLayout(576, torch.bfloat16, 64), load, 7)
    shape = plan_shape(21, 7, 20, 2 if invariant else 0, 1024)
    held = plan._reserve(shape, torch.device("cpu"))
    assert held_bytes(held) == total_bytes(counted)
    assert held.program.shape == (132, 16)
    assert held.entry.shape == (22, 8)
    assert held.merge.shape == (1 + 132, 8)


def test_hopper_is_for_one_architecture() -> None:
    found = of_v3(device=Device("sm_80", 108))
    assert found.refused["hopper"] == ("architecture is sm_80, accepted is sm_90",)
    assert found.preferred == "triton"
    with pytest.raises(UnsupportedError, match="sm_80"):
        HopperBackend().scratch(
            StepSize(Device("sm_80", 1), torch.bfloat16, 1, 1, 1, 1, 512, 64, 64)
        )


def test_models_that_kernels_do_not_serve() -> None:
    odd = dataclasses.replace(SMALL, kv_lora_rank=48)
    load = Load(context=100, batch=2, query_len=1, device=H200)
    found = account(ModelSize(odd, 3), CacheLayout(64, torch.bfloat16, 64), load)
    assert found.preferred == "reference"
    assert any("kv_lora_rank is 48" in reason for reason in found.refused["triton"])


@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_the_model(moe: MoEConfig | None, tied: bool) -> None:
    config = DeepseekConfig(SMALL, 4, 100, 56, 256, moe=moe, tie_word_embeddings=tied)
    held = sum(4 * t.numel() for t in DeepseekForCausalLM(config).state_dict().values())
    assert stored_weight_bytes(config.to_hf() | {"torch_dtype": "float32"}) == held


def test_fp8_weights_have_a_scale_a_block() -> None:
    at = dataclasses.replace(SMALL, hidden_size=256, q_lora_rank=None)
    config = DeepseekConfig(at, 1, 10, 130, 256)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    told = config.to_hf() | {"dtype": "bfloat16", "quantization_config": blocks}
    linears = {"q": (72, 256), "a": (48, 256), "b": (60, 32), "o": (256, 36)}
    codes = sum(a * b for a, b in linears.values()) + 3 * 130 * 256
    scales = (2 + 2 + 1 + 2) + 3 * 4
    rest = 2 * (2 * 10 * 256 + 3 * 256 + 32)
    assert stored_weight_bytes(told) == codes + 4 * scales + rest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch_dtype": None}, "torch_dtype is None"),
        ({"quantization_config": {"quant_method": "awq"}}, "accepted are null and fp8"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures is"),
    ],
    ids=["dtype", "quantisation", "architecture"],
)
def test_a_config_that_does_not_tell(changes: dict[str, Any], words: str) -> None:
    told = DeepseekConfig(SMALL, 4, 100, 56, 256).to_hf() | {"torch_dtype": "float32"} | changes
    found = ModelSize.from_hf(told)
    assert found.weight_bytes is None
    assert words in found.unknown
    assert found.num_layers == 4


def test_what_fits_is_the_most_that_fits() -> None:
    found = of_v3(context=4096, batch=1)
    for memory in (0, 2**20, 2**30, 10**11):
        count = found.fitting(memory)
        assert not count or found.needed_bytes(count) <= memory
        assert found.needed_bytes(count + 1) > memory
    for count in (1, 2, 700):
        needed = found.needed_bytes(count)
        assert found.fitting(needed) == count
        assert found.fitting(needed - 1) == count - 1


@pytest.mark.parametrize("name", ["context", "batch", "query_len"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_a_load_that_can_not_be(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is {value}"):
        of_v3(**{name: value})


def test_more_rows_than_tokens_and_another_width_are_refused() -> None:
    with pytest.raises(ArgumentError, match="query_len is 5, accepted are 1 to 4"):
        of_v3(context=4)
    with pytest.raises(ArgumentError, match=r"layout\.width is 512, accepted is 576"):
        account(ModelSize(V3, 1), CacheLayout(512, torch.float32, 64), Load(8, 1, 1, H200))
    with pytest.raises(ArgumentError, match="num_hidden_layers is 0"):
        ModelSize.from_hf({"num_hidden_layers": 0})
