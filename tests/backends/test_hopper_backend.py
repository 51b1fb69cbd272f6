"""What the Hopper backend declares and refuses, without a device."""

from __future__ import annotations

import pytest
import torch

from specmla.backends.base import Requirements
from specmla.backends.hopper import HopperBackend
from specmla.backends.select import backend_for, choose_backend, get_backend
from specmla.cache import cache_format
from specmla.cache.formats.base import CacheFormat
from specmla.errors import ArgumentError, UnsupportedError
from specmla.mask import DraftMask
from specmla.query_form import Fp8Query
from specmla.testing import make_case


def need(**changes: object) -> Requirements:
    wanted: dict[str, object] = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "num_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 64,
    }
    return Requirements(**(wanted | changes))  # type: ignore[arg-type]


def test_it_is_found_by_name() -> None:
    assert isinstance(get_backend("hopper"), HopperBackend)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device": torch.device("cpu")}, "device is 'cpu'"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32"),
        ({"page_size": 48}, "page_size is 48"),
        ({"page_size": 8}, "page_size is 8"),
    ],
)
def test_refusals_name_value_and_what_is_accepted(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        HopperBackend().check(need(**changes))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192])
def test_page_sizes_it_serves(page_size: int) -> None:
    found = HopperBackend().problems(need(page_size=page_size))
    assert not any(text.startswith("page_size") for text in found)


def test_all_reasons_come_at_once() -> None:
    case = make_case("1q2s65", num_heads=4, kv_lora_rank=64, rope_dim=16, page_size=48)
    part = case.tables()
    with pytest.raises(ArgumentError) as raised:
        HopperBackend().forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=0.0
        )
    for word in ("C and R are 64 and 16", "dtype is", "page_size is 48", "softmax_scale", "plan"):
        assert word in str(raised.value)


def e4m3(name: str = "fp8") -> CacheFormat:
    return cache_format(name, 512, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"format": e4m3("fp8_ds_mla")}, "format is 'fp8_ds_mla', accepted are"),
        ({"format": e4m3("fp8_per_token_head")}, "format is 'fp8_per_token_head', accepted are"),
        ({"format": e4m3(), "batch_invariant": True}, "batch_invariant over 'fp8' is True"),
        ({"format": e4m3(), "page_size": 48}, "page_size is 48"),
        ({"format": e4m3(), "dtype": torch.float16}, r"format is for \(C, R, dtype\)"),
        ({"format": e4m3(), "query_form": Fp8Query()}, "query_form is"),
    ],
)
def test_refusals_over_quantised_caches(changes: dict[str, object], word: str) -> None:
    wanted = need(**changes)
    with pytest.raises(UnsupportedError, match=word):
        backend_for(wanted, "hopper").check(wanted)


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every backend but FlashMLA's believe that it runs on sm_90."""
    for kind in (HopperBackend, get_backend("triton").__class__, get_backend("rows").__class__):
        monkeypatch.setattr(kind, "problems", kind.declared_problems)
    flashmla = get_backend("flashmla").__class__
    monkeypatch.setattr(flashmla, "problems", lambda self, need: ["no library"])


def test_it_is_chosen_for_e4m3_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    found = choose_backend(need(format=e4m3(), masks=frozenset(DraftMask)))
    assert isinstance(found.backend, HopperBackend)
    assert found.backend.cache_format == e4m3()
    assert any("its priority is" in text for text in found.reasons["triton"])


@pytest.mark.parametrize(
    "changes", [{"format": e4m3(), "batch_invariant": True}, {"format": e4m3("fp8_ds_mla")}]
)
def test_others_serve_what_it_refuses(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hopper(monkeypatch)
    found = choose_backend(need(**changes))
    assert found.backend.capabilities.name == "triton"
    assert found.reasons["hopper"]
